package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery/rules"
	"chandler.dev/internal/command"
	"chandler.dev/internal/docs"
)

// With an imported configuration, a host offers the same devices as with the plugin.
func TestConfigImportOnHosts(t *testing.T) {
	tests := []struct {
		file, host string
		want       string // each resource with the number of IDs, and the first ID
	}{
		{"nvidia-mps.yaml", "nvidia/testdata/h100x8", "nvidia.com/gpu 18 GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9ae41b::0"},
		{"nvidia-every-option.yaml", "nvidia/testdata/a100-single", "nvidia.com/gpu.shared 20 MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e403::0"},
		{"gpu_config.json", "nvidia/testdata/gke", "nvidia.com/gpu 9 nvidia0/vgpu0"},
		{"hami-command.yaml", "nvidia/testdata/h100x8", "nvidia.com/gpu 36 GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9ae41b::0"},
		{"intel-values.yaml", "intelgpu/testdata/flex170x2", "gpu.intel.com/i915 6 card1-0, gpu.intel.com/monitoring 1 all"},
		{"intel.args", "intelgpu/testdata/flex170x2", "gpu.intel.com/i915 8 card1-0, gpu.intel.com/i915_monitoring 1 all"},
		{"intel-operator.yaml", "intelgpu/testdata/flex170x2", "gpu.intel.com/i915_monitoring 1 all"},
		{"intel-operator.yaml", "qat/testdata/4xxx", "qat.intel.com/cy 3 0000:6b:00.1, qat.intel.com/dc 3 0000:e8:00.1"},
		{"intel-operator.yaml", "sgx/testdata/server", "sgx.intel.com/enclave 20 sgx-enclave-0, sgx.intel.com/provision 110 sgx-provision-0"},
		{"intel-operator.yaml", "idxd/testdata/spr", "dsa.intel.com/wq-user-dedicated 1 wq-user-dedicated-wq0.0-0, dsa.intel.com/wq-user-shared 10 wq-user-shared-wq0.1-0, iaa.intel.com/wq-user-dedicated 1 wq-user-dedicated-wq1.1-0, iaa.intel.com/wq-user-shared 2 wq-user-shared-wq1.0-0"},
		{"intel-operator.yaml", "npu/testdata/laptop", "npu.intel.com/accel 3 accel0-0"},
		{"rocm-mixed.yaml", "amdgpu/testdata/mi300x-cpx", "amd.com/cpx_nps4 16 0000:05:00.0"},
		{"rocm-operator.yaml", "amdgpu/testdata/mi210x8", "amd.com/gpu 8 0000:23:00.0"},
		{"kubevirt.yaml", "vfio/testdata/vgpu", "nvidia.com/GRID_T4-1Q 2 83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"},
		{"squat.args", "hypervisor/testdata/five", "neonvm.dev/kvm 1000 59cda87680f12cd41a03a261866c588fc85a31ec"},
		{"network-operator-values.yaml", "rdma/testdata/connectx7", "rdma/rdma_shared_device_a 63 0"},
		{"sriovdp-pools.yaml", "sriovnet/testdata/e810", "example.com/rest 2 0000:16:00.1, intel.com/last 1 0000:16:01.3, intel.com/vfio 2 0000:16:01.0"},
		{"sriovdp-virt.yaml", "vfio/testdata/pools", "intel.com/virtio 1 0000:41:00.0"},
	}
	for _, test := range tests {
		t.Run(test.file+" on "+test.host, func(t *testing.T) {
			got := offered(t, filepath.Join("..", "kubectl-chandler", "importer", "testdata", test.file), filepath.Join("..", "..", "discovery", "families", test.host+".host"))
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Each MIG strategy of the NVIDIA plugin results in its resource names, as docs/nvidia.md lists
// them. With "none", instances also keep their names, where the plugin offers GPUs that cannot
// compute. With "single", a node with unlike instances offers none, where the plugin does not
// start.
func TestConfigImportMIGStrategies(t *testing.T) {
	const (
		alike   = "a100-single" // every GPU has instances of one profile
		unlike  = "h100-mig"    // two GPUs are whole, and another has instances of several profiles
		whole   = "gb200"       // no GPU is partitioned
		gpus    = "nvidia.com/gpu 4 GPU-5d2c1f08-8a41-4e0b-9c37-0b6f3d9ae408"
		parts   = "nvidia.com/mig-2g.10gb 5 MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e403"
		ofThree = "nvidia.com/gpu 2 GPU-5d2c1f43-8a41-4e0b-9c37-0b6f3d9ae443, nvidia.com/mig-1g.10gb 1 MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e490, " +
			"nvidia.com/mig-1g.10gb.me 1 MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e4a0"
	)
	for _, test := range []struct{ strategy, host, want string }{
		{"none", whole, gpus},
		{"none", unlike, ofThree},
		{"none", alike, parts},
		{"mixed", whole, gpus},
		{"mixed", unlike, ofThree},
		{"mixed", alike, parts},
		{"single", whole, gpus},
		{"single", unlike, ""},
		{"single", alike, "nvidia.com/gpu 5 MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e403"},
	} {
		file := filepath.Join(t.TempDir(), "plugin.yaml")
		write(t, file, "version: v1\nflags: {migStrategy: "+test.strategy+"}\n")
		got := offered(t, file, filepath.Join("..", "..", "discovery", "families", "nvidia", "testdata", test.host+".host"))
		if got != test.want {
			t.Errorf("%s on %s: offers %q; want %q", test.strategy, test.host, got, test.want)
		}
	}
}

// The examples of docs/nvidia.md have the same results for single, and for no instances.
func TestMIGStrategiesOfDocs(t *testing.T) {
	for _, test := range []struct{ example, host, want string }{
		{"matchAttributes: [", "gb200", "nvidia.com/gpu 4 GPU-5d2c1f08-8a41-4e0b-9c37-0b6f3d9ae408"},
		{"matchAttributes: [", "h100-mig", ""},
		{"matchAttributes: [", "a100-single", "nvidia.com/gpu 5 MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e403"},
		{"exclude:", "h100-mig", "nvidia.com/gpu 2 GPU-5d2c1f43-8a41-4e0b-9c37-0b6f3d9ae443"},
		{"exclude:", "a100-single", ""},
	} {
		config := exampleOf(t, "nvidia.md", test.example)
		if got := offeredBy(t, config, filepath.Join("..", "..", "discovery", "families", "nvidia", "testdata", test.host+".host")); got != test.want {
			t.Errorf("%s on %s: offers %q; want %q", test.example, test.host, got, test.want)
		}
	}
}

// A container that requests GPUDirect Storage with the example of docs/nvidia.md gets all of its
// nodes.
func TestStorageNodesOfDocs(t *testing.T) {
	config := exampleOf(t, "nvidia.md", "example.com/gds")
	host := filepath.Join(t.TempDir(), "gds.host")
	write(t, host, `Nodes of GDRCopy and GPUDirect Storage.

-- proc/devices --
Character devices:
235 nvidia-fs
236 gdrdrv

Block devices:
-- dev/gdrdrv c 236:0 --
-- dev/nvidia-fs0 c 235:0 --
-- dev/nvidia-fs1 c 235:1 --
-- dev/nvidia-fs15 c 235:15 --
-- run/udev/control --
-- sys/class/misc/ --
-- end --
`)
	if got, want := offeredBy(t, config, host), "example.com/gdrcopy 100 "; !strings.HasPrefix(got, want) || !strings.Contains(got, "example.com/gds 100 ") {
		t.Errorf("offers %q", got)
	}
	out := mustRun(t, "discover", "-o", "json", "--config", config, "--node-labels", "kubernetes.io/os=linux", host)
	for _, file := range []string{"/dev/gdrdrv", "/dev/nvidia-fs0", "/dev/nvidia-fs1", "/dev/nvidia-fs15", "/run/udev"} {
		if !strings.Contains(out, `"hostPath": "`+file+`"`) {
			t.Errorf("no container gets %s", file)
		}
	}
}

// exampleOf writes the example with the given text to a file, and returns the file's path.
func exampleOf(t *testing.T, name, text string) string {
	t.Helper()
	page, err := docs.Read(filepath.Join("..", ".."), filepath.Join("..", "..", "docs", name))
	if err != nil {
		t.Fatal(err)
	}
	blocks := page.Blocks()
	i := slices.IndexFunc(blocks, func(b docs.Block) bool { return strings.Contains(b.Text, text) })
	if i < 0 {
		t.Fatalf("%s has no example with %s", name, text)
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	write(t, file, blocks[i].Text)
	return file
}

// offered returns each resource of a host with an imported configuration, with the number of IDs,
// and the first ID.
func offered(t *testing.T, file, host string) string {
	t.Helper()
	var out bytes.Buffer
	cmd := newPlugin()
	cmd.SetArgs([]string{"import", "--only", file})
	cmd.SetOut(&out)
	if err := cmd.Execute(); err != nil && command.ExitCode(err) != 2 { // 2: a part of the file changes what pods get
		t.Fatal(err)
	}
	config := filepath.Join(t.TempDir(), "config.yaml")
	write(t, config, out.String())
	return offeredBy(t, config, host)
}

// offeredBy is like offered, for a configuration.
func offeredBy(t *testing.T, config, host string) string {
	t.Helper()
	var snapshot rules.Snapshot
	if err := json.Unmarshal([]byte(mustRun(t, "discover", "-o", "json", "--config", config, "--node-labels", "kubernetes.io/os=linux", host)), &snapshot); err != nil {
		t.Fatal(err)
	}
	ids := make(map[string][]string)
	for _, d := range snapshot.Devices {
		for _, offer := range d.Offers {
			for _, id := range offer.IDs { // each device of a pool has all IDs of the pool
				if !slices.Contains(ids[offer.Resource], id) {
					ids[offer.Resource] = append(ids[offer.Resource], id)
				}
			}
		}
	}
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(ids)) {
		lines = append(lines, fmt.Sprint(name, " ", len(ids[name]), " ", ids[name][0]))
	}
	return strings.Join(lines, ", ")
}
