package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"chandler.dev/discovery/families/nvidia/migtest"
	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
)

// migDir is the node's directory of the host with GPUs in MIG mode. The mock of the driver writes
// to kernelDir: its own state, and the files that the kernel driver would show.
const (
	migDir    = "/var/lib/chandler/mig"
	kernelDir = migDir + "/kernel"
)

// migHost is a host with the GPUs that chandler-host mocks. See load_mock.go there.
const migHost = `An H100 and an A100, which chandler-host has in MIG mode.

-- proc/devices --
Character devices:
  1 mem
195 nvidia
506 nvidia-caps

Block devices:
-- proc/driver/nvidia/gpus/0000:00:00.0/information --
Model: 		 NVIDIA H100 80GB HBM3
GPU UUID: 	 GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9a0000
Device Minor: 	 0
GPU Excluded:	 No
-- proc/driver/nvidia/gpus/0000:01:00.0/information --
Model: 		 NVIDIA A100-SXM4-40GB
GPU UUID: 	 GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9a0001
Device Minor: 	 1
GPU Excluded:	 No
-- sys/module/nvidia/version --
570.86.15
-- sys/bus/pci/devices/0000:00:00.0 -> ../../../devices/pci0000:00/0000:00:00.0 --
-- sys/devices/pci0000:00/0000:00:00.0/vendor --
0x10de
-- sys/devices/pci0000:00/0000:00:00.0/device --
0x2330
-- sys/devices/pci0000:00/0000:00:00.0/class --
0x030200
-- sys/devices/pci0000:00/0000:00:00.0/driver -> ../../../bus/pci/drivers/nvidia --
-- sys/bus/pci/devices/0000:01:00.0 -> ../../../devices/pci0000:01/0000:01:00.0 --
-- sys/devices/pci0000:01/0000:01:00.0/vendor --
0x10de
-- sys/devices/pci0000:01/0000:01:00.0/device --
0x20b0
-- sys/devices/pci0000:01/0000:01:00.0/class --
0x030200
-- sys/devices/pci0000:01/0000:01:00.0/driver -> ../../../bus/pci/drivers/nvidia --
-- sys/bus/pci/drivers/nvidia/bind --
-- dev/nvidiactl c 195:255 --
-- dev/nvidia0 c 195:0 --
-- dev/nvidia1 c 195:1 --
-- dev/null c 1:3 --
-- end --
`

// The GPUs in order of their number: models has their names in package migtest, and silicon has
// their device names.
var (
	models  = []string{"H100", "A100"}
	silicon = []string{"pci-0000-00-00-0", "pci-0000-01-00-0"}
)

// profilesOfMock maps NVML's numbers of profiles to names (NVML_GPU_INSTANCE_PROFILE_* in nvml.h),
// for each GPU.
var profilesOfMock = []map[int]string{
	{0: "1g.10gb", 1: "2g.20gb", 2: "3g.40gb", 3: "4g.40gb", 4: "7g.80gb", 7: "1g.10gb+me", 9: "1g.20gb"},
	{0: "1g.5gb", 1: "2g.10gb", 2: "3g.20gb", 3: "4g.20gb", 4: "7g.40gb", 7: "1g.5gb+me", 9: "1g.10gb"},
}

// migConfig allows partitions of both GPUs.
const migConfig = `
onDemand:
  keepSeconds: 2
  partitions:
  - cel: device.attributes["chandler.dev"].?model.orValue("").startsWith("NVIDIA ")
`

// standAmongMIG moves the agent to the host with GPUs in MIG mode until the test ends, with a host
// service that reads the mock of NVML.
func standAmongMIG(t *testing.T, config string) {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("there is no C compiler to build chandler-host with")
	}
	nvml, err := (build.Builder{Progress: os.Stderr}).MockedNVML(t.Context(), project.Dir) // A first build takes long.
	if err != nil {
		t.Fatal(err)
	}
	image := cluster.Image{
		Name: chandler.AgentImage + "-host", Files: map[string]string{"/chandler": project.Agent, "/chandler-host": nvml}, Entrypoint: []string{"/chandler"},
	}
	if err := node.LoadImage(within(t), image); err != nil {
		t.Fatal(err)
	}
	layOutMachine(t, migDir, migHost)
	patch, err := os.ReadFile(project.Manifest("examples/host-service-patch.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(kube.Apply(within(t), usual(t)), project.Stand(within(t), kube, chandler.HostDir)); err != nil {
			t.Error(err)
		}
		offers(t)
	})
	t.Cleanup(func() {
		if t.Failed() {
			tellHostService(t)
		}
		remove(t, hostService)
	})
	if err := errors.Join(kube.Apply(within(t), hostService), kube.Apply(within(t), config), project.Stand(within(t), kube, migDir, string(patch))); err != nil {
		t.Fatal(err)
	}
}

// A gpuInstance is a GPU instance in the mock's state. See package mocked.
type gpuInstance struct {
	GI, Start, Size, Profile int
	Parts                    []struct {
		CI   int
		UUID string
	}
}

// device returns the device name of an instance.
func (i *gpuInstance) device(gpu int) string {
	profile := strings.NewReplacer(".", "-", "+", "-").Replace(profilesOfMock[gpu][i.Profile])
	return fmt.Sprintf("%s-mig-%s-at-%d", silicon[gpu], profile, i.Start)
}

// nodes returns the device nodes of an instance, by the mock's numbering.
func (i *gpuInstance) nodes(gpu int) []string {
	minor := 100*gpu + 10*i.GI + 3
	return []string{fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor+1+i.Parts[0].CI)}
}

// cutInstances returns the GPU instances of both GPUs.
func cutInstances() (map[int][]gpuInstance, error) {
	file, err := os.Open(node.NodePath(kernelDir + "/mig.json"))
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_SH); err != nil {
		return nil, err
	}
	var state struct{ Instances map[int][]gpuInstance }
	err = json.NewDecoder(file).Decode(&state)
	return state.Instances, err
}

// legal returns an error if the existing GPU instances violate the placements and rules of NVIDIA's
// MIG User Guide.
func legal(all map[int][]gpuInstance) error {
	var errs []error
	for gpu, instances := range all {
		guide := &migtest.GPU{Profiles: migtest.Layouts[models[gpu]]}
		seen := make(map[string]bool)
		for i := range instances {
			place := fmt.Sprintf("%s@%d", profilesOfMock[gpu][instances[i].Profile], instances[i].Start)
			err := guide.CreateInstance(place)
			if err == nil && seen[place] {
				err = errors.New("it is there twice")
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %s: %w", models[gpu], place, err))
			}
			seen[place] = true
		}
	}
	return errors.Join(errs...)
}

// devicesCut returns the sorted device names of the existing instances. Instances without a compute
// instance have a question mark.
func devicesCut() ([]string, error) {
	all, err := cutInstances()
	var names []string
	for _, gpu := range slices.Sorted(maps.Keys(all)) {
		for i := range all[gpu] {
			name := all[gpu][i].device(gpu)
			if len(all[gpu][i].Parts) != 1 {
				name += "?"
			}
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, err
}

// layOutMachine creates a recorded host in a directory of the node until the test ends.
func layOutMachine(t *testing.T, dir, host string) {
	t.Helper()
	undo, err := project.LayOutMachine(within(t), node.Node, dir, host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := undo(); err != nil {
			t.Error(err)
		}
	})
}
