package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// ComputePercentage is how much of the computing of each device the containers
// may use at most: a decimal number from 1 to 100.
const ComputePercentage discovery.Parameter = "computePercentage"

// With MPS, NVIDIA's Multi-Process Service, programs that have a GPU together
// compute on it at the same time, and their CUDA keeps to limits. A daemon that
// the administrator starts controls it. Programs find it by the directory of its
// sockets and pipes, and share memory with it in /dev/shm; see
// https://docs.nvidia.com/deploy/mps.
const (
	mpsRoot      = "nvidia-mps"
	mpsDirectory = "/mps" // where the root is in containers, as with NVIDIA's device plugin
	mpsControl   = "control"
	sharedMemory = "/dev/shm"

	pipeDirectory = "CUDA_MPS_PIPE_DIRECTORY"
	memoryLimit   = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	threadLimit   = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
	deviceOrder   = "CUDA_DEVICE_ORDER"
)

// mpsPipes are where the daemon's pipes are below the root: as NVIDIA's
// mps-control-daemon leaves them for the two names of the resource, or as who
// starts a daemon by hand may have them, the default /tmp/nvidia-mps among it.
var mpsPipes = []string{"nvidia.com/gpu/pipe", "nvidia.com/gpu.shared/pipe", "pipe", "."}

// readMPS returns what a container needs to use a GPU by MPS, nothing where no
// root is named for it.
func readMPS(host *discovery.Host) (specs.ContainerEdits, error) {
	root := host.Roots[mpsRoot]
	if root == "" {
		return specs.ContainerEdits{}, nil
	}
	root = path.Clean("/" + root)
	i := slices.IndexFunc(mpsPipes, func(pipe string) bool { return host.Exists(path.Join(root, pipe, mpsControl)) })
	if i < 0 {
		return specs.ContainerEdits{}, fmt.Errorf("MPS: no control daemon has its pipes below %s", root)
	}
	inside := path.Join(mpsDirectory, mpsPipes[i])
	edits := specs.ContainerEdits{
		Env:    []string{pipeDirectory + "=" + inside},
		Mounts: []*specs.Mount{writable(path.Join(root, mpsPipes[i]), inside)},
	}
	if shm := path.Join(root, "shm"); host.Exists(shm) {
		edits.Mounts = append(edits.Mounts, writable(shm, sharedMemory))
	}
	return edits, nil
}

func writable(hostPath, containerPath string) *specs.Mount {
	return &specs.Mount{
		HostPath:      hostPath,
		ContainerPath: containerPath,
		Options:       []string{"rw", "nosuid", "nodev", "rbind", "rprivate"},
	}
}

// ofDriver reports whether a mount is of the driver's libraries and programs, and
// not of MPS.
func ofDriver(m *specs.Mount) bool {
	return m.ContainerPath != sharedMemory && !strings.HasPrefix(m.ContainerPath, mpsDirectory)
}

// usesMPS reports whether whoever has the GPU uses it by MPS.
func usesMPS(d discovery.Device) bool {
	return slices.ContainsFunc(d.Edits.Env, func(variable string) bool { return strings.HasPrefix(variable, pipeDirectory+"=") })
}

// limits returns the variables by which CUDA keeps each process to what was
// given of the GPUs, nothing where MPS does not have all of them.
func limits(given []discovery.Device, grant discovery.Grant) []string {
	var gpus []discovery.Device
	for _, d := range given {
		if d.Attributes.String("kind") == "gpu" {
			gpus = append(gpus, d)
		}
	}
	// In the order of their addresses, as CUDA numbers them when told to.
	slices.SortFunc(gpus, func(a, b discovery.Device) int { return cmp.Compare(a.Name, b.Name) })
	gpus = slices.CompactFunc(gpus, func(a, b discovery.Device) bool { return a.Name == b.Name })
	if len(gpus) == 0 || slices.ContainsFunc(gpus, func(d discovery.Device) bool { return !usesMPS(d) }) {
		return nil
	}
	var env, memory []string
	percentage, _ := strconv.ParseInt(grant.Parameters[ComputePercentage], 10, 64) // which is checked, or not there
	for i, d := range gpus {
		share := shareOf(d, grant.Consumed)
		if share.memory > 0 {
			memory = append(memory, fmt.Sprintf("%d=%dM", i, max(1, share.memory>>20)))
		}
		if share.percentage > 0 && (percentage == 0 || share.percentage < percentage) {
			percentage = share.percentage
		}
	}
	if len(memory) > 0 {
		env = append(env, memoryLimit+"="+strings.Join(memory, ","))
		if len(gpus) > 1 {
			env = append(env, deviceOrder+"=PCI_BUS_ID")
		}
	}
	if percentage > 0 {
		env = append(env, fmt.Sprintf("%s=%d", threadLimit, percentage))
	}
	return env
}

// share is what is given of a GPU, 0 where that is not limited.
type share struct{ memory, percentage int64 }

// shareOf returns what was given of a GPU. Of one that is shared by number, each
// share is an equal part of its memory and of its computing, as with NVIDIA's
// and Google's device plugins.
func shareOf(d discovery.Device, consumed discovery.Consumed) share {
	memory, shares := consumed[d.Name]["memory"], consumed[d.Name][discovery.Shares]
	all, of := d.Capacity["memory"].Value, d.Capacity[discovery.Shares].Value
	if n := shares.Value(); n > 0 && n <= of.Value() {
		return share{all.Value() / of.Value() * n, max(1, 100*n/of.Value())}
	}
	return share{memory: memory.Value()}
}

// accept refuses a part of the computing of GPUs that nothing would keep a
// container to.
func accept(given []discovery.Device, parameters discovery.Parameters) error {
	errs := acceptUpkeep(given, parameters)
	if parameters[ComputePercentage] == "" || parameters[MPS] != "" {
		return errors.Join(errs...)
	}
	for _, d := range given {
		if !usesMPS(d) {
			errs = append(errs, fmt.Errorf("%s: device %s: only MPS keeps to it, which is for GPUs that the administrator has shared, and found by roots[%s]",
				ComputePercentage, d.Name, mpsRoot))
		}
	}
	return errors.Join(errs...)
}
