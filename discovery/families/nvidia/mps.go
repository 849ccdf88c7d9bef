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

// ComputePercentage limits the share of each device's compute capacity that the containers may use:
// a decimal number from 1 to 100.
const ComputePercentage discovery.Parameter = "computePercentage"

// With MPS, the NVIDIA Multi-Process Service, programs that share a GPU compute on the GPU at the
// same time, and their CUDA libraries enforce limits. A daemon that the administrator starts
// controls MPS. Programs find the daemon by the directory of its sockets and pipes, and share
// memory with the daemon in /dev/shm; see https://docs.nvidia.com/deploy/mps.
const (
	mpsRoot      = "nvidia-mps"
	mpsDirectory = "/mps" // the path of the root in containers, as in the NVIDIA device plugin
	mpsControl   = "control"
	sharedMemory = "/dev/shm"

	pipeDirectory = "CUDA_MPS_PIPE_DIRECTORY"
	memoryLimit   = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	threadLimit   = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
	deviceOrder   = "CUDA_DEVICE_ORDER"
)

// mpsPipes lists the possible locations of the daemon's pipes below the root: the NVIDIA
// mps-control-daemon creates the first two, for both names of the resource. An administrator who
// starts a daemon manually may use the others; "." covers the default, /tmp/nvidia-mps.
var mpsPipes = []string{"nvidia.com/gpu/pipe", "nvidia.com/gpu.shared/pipe", "pipe", "."}

// readMPS returns the edits for containers that use a GPU through MPS. The edits are empty if no
// MPS root is named.
func readMPS(host *discovery.Host) (specs.ContainerEdits, error) {
	root := host.Roots[mpsRoot]
	if root == "" {
		return specs.ContainerEdits{}, nil
	}
	root = path.Clean("/" + root)
	i := slices.IndexFunc(mpsPipes, func(pipe string) bool { return host.FileExists(path.Join(root, pipe, mpsControl)) })
	if i < 0 {
		return specs.ContainerEdits{}, fmt.Errorf("MPS: no control daemon has its pipes below %s", root)
	}
	inside := path.Join(mpsDirectory, mpsPipes[i])
	edits := specs.ContainerEdits{
		Env:    []string{pipeDirectory + "=" + inside},
		Mounts: []*specs.Mount{writableMount(path.Join(root, mpsPipes[i]), inside)},
	}
	if shm := path.Join(root, "shm"); host.FileExists(shm) {
		edits.Mounts = append(edits.Mounts, writableMount(shm, sharedMemory))
	}
	return edits, nil
}

func writableMount(hostPath, containerPath string) *specs.Mount {
	return &specs.Mount{
		HostPath:      hostPath,
		ContainerPath: containerPath,
		Options:       []string{"rw", "nosuid", "nodev", "rbind", "rprivate"},
	}
}

// ofDriver reports whether a mount contains the driver's libraries or programs, as opposed to the
// files of MPS.
func ofDriver(m *specs.Mount) bool {
	return m.ContainerPath != sharedMemory && !strings.HasPrefix(m.ContainerPath, mpsDirectory)
}

// usesMPS reports whether the GPU's consumers use the GPU through MPS.
func usesMPS(d discovery.Device) bool {
	return slices.ContainsFunc(d.Edits.Env, func(variable string) bool { return strings.HasPrefix(variable, pipeDirectory+"=") })
}

// mpsLimits returns the environment variables that make CUDA restrict each process to the allocated
// amounts of the GPUs. The result is nil unless all GPUs use MPS.
func mpsLimits(given []discovery.Device, grant discovery.Grant) []string {
	var gpus []discovery.Device
	for _, d := range given {
		if d.Attributes.String("kind") == "gpu" {
			gpus = append(gpus, d)
		}
	}
	// Sort by PCI address, the order of CUDA with CUDA_DEVICE_ORDER=PCI_BUS_ID.
	slices.SortFunc(gpus, func(a, b discovery.Device) int { return cmp.Compare(a.Name, b.Name) })
	gpus = slices.CompactFunc(gpus, func(a, b discovery.Device) bool { return a.Name == b.Name })
	if len(gpus) == 0 || slices.ContainsFunc(gpus, func(d discovery.Device) bool { return !usesMPS(d) }) {
		return nil
	}
	var env, memory []string
	percentage, _ := strconv.ParseInt(grant.Parameters[ComputePercentage], 10, 64) // validated earlier, or empty
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

// share is the allocated amount of a GPU; 0 means no limit.
type share struct{ memory, percentage int64 }

// shareOf returns the allocated amount of a GPU. If a GPU is shared by number, each share is an
// equal part of the memory and of the compute capacity, as in the device plugins of NVIDIA and
// Google.
func shareOf(d discovery.Device, consumed discovery.Consumed) share {
	memory, shares := consumed[d.Name]["memory"], consumed[d.Name][discovery.Shares]
	all, of := d.Capacity["memory"].Value, d.Capacity[discovery.Shares].Value
	if n := shares.Value(); n > 0 && n <= of.Value() {
		return share{all.Value() / of.Value() * n, max(1, 100*n/of.Value())}
	}
	return share{memory: memory.Value()}
}

// accept returns an error if the devices of a request cannot be allocated with the parameters, for
// example a compute percentage for a GPU without MPS, where nothing enforces the limit.
func accept(given []discovery.Device, parameters discovery.Parameters) error {
	errs := acceptDaemons(given, parameters)
	if parameters[ComputePercentage] == "" || parameters[MPS] != "" {
		return errors.Join(errs...)
	}
	for _, d := range given {
		if !usesMPS(d) {
			errs = append(errs, fmt.Errorf("%s: device %s: only MPS keeps to it, which is for GPUs that the administrator has shared, and found by driverRoots[%s]",
				ComputePercentage, d.Name, mpsRoot))
		}
	}
	return errors.Join(errs...)
}
