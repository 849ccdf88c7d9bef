package nvidia_test

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/families/nvidia/migtest"
)

// Without NVML no instance is removed, and the error names a remedy, unless the instance is gone.
func TestUnmakeWithoutNVML(t *testing.T) {
	gpu := &migtest.GPU{Profiles: migtest.Layouts["H100"], Silent: true}
	for _, place := range []string{"1g.10gb@0", "1g.10gb@1"} {
		if err := gpu.CreateInstance(place); err != nil {
			t.Fatal(err)
		}
	}
	made := discovery.Creation{
		Unit: migtest.Device + "-mig-1g-10gb-at-1", Of: "sys/devices/pci0000:00/0000:00:01.0/0000:1b:00.0",
		How: map[string]string{"gpu": migtest.Address, "place": "1g.10gb@1", "state": "cut", "gpuInstance": "2"},
	}
	work, err := nvidia.Family.Remove(&discovery.Host{FS: gpu.Files()}, discovery.Tools{}, made)
	for _, want := range []string{"MIG instance 1g.10gb@1 of GPU 0000:1b:00.0", "Switch NVML on again", "nvidia-smi mig -i 0000:1b:00.0 -dci -gi 2; nvidia-smi mig -i 0000:1b:00.0 -dgi -gi 2"} {
		if work != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
	gpu.Remove("1g.10gb@1")
	if work, err := nvidia.Family.Remove(&discovery.Host{FS: gpu.Files()}, discovery.Tools{}, made); work != nil || err != nil {
		t.Errorf("it is gone: work %t, %v", work != nil, err)
	}
}

// An instance counts as removed if its GPU is gone or has another driver: nothing is left to
// remove, and no agent waits for the instance permanently. If NVML does not answer, the instance
// stays.
func TestUnmakeOfWhatIsGone(t *testing.T) {
	gpu := &migtest.GPU{Profiles: migtest.Layouts["H100"]}
	const source = "sys/devices/pci0000:00/0000:00:01.0/0000:1b:00.0"
	made := discovery.Creation{
		Unit: migtest.Device + "-mig-1g-10gb-at-0", Of: source,
		How: map[string]string{"gpu": migtest.Address, "place": "1g.10gb@0"},
	}
	tools := discovery.Tools{
		ChangePartition: func(context.Context, discovery.PartitionChange) ([]byte, error) { return nil, errors.New("asked") },
		AmendRecord:     func(string, map[string]string) error { return nil },
	}
	without := func(files fstest.MapFS, told ...facts.GPU) {
		text, err := facts.Format(told)
		if err != nil {
			t.Fatal(err)
		}
		files[facts.Path[1:]] = &fstest.MapFile{Data: text}
	}
	for name, test := range map[string]struct {
		change func(files fstest.MapFS)
		want   string // the error, "" if there is no work
	}{
		"it is there": {func(fstest.MapFS) {}, "asked"},
		"the GPU was pulled out": {func(files fstest.MapFS) {
			without(files)
			maps.DeleteFunc(files, func(name string, _ *fstest.MapFile) bool {
				return len(name) > len(source) && name[:len(source)] == source
			})
		}, ""},
		"a virtual machine has the GPU": {func(files fstest.MapFS) {
			without(files)
			files[source+"/driver"] = &fstest.MapFile{Mode: files[source+"/driver"].Mode, Data: []byte("../../../../bus/pci/drivers/vfio-pci")}
		}, ""},
		"the driver has no such place any more": {func(files fstest.MapFS) {
			without(files, facts.GPU{Address: migtest.Address, MIG: "enabled", Profiles: migtest.Layouts["A30"]})
		}, ""},
		"it is in MIG mode no more": {func(files fstest.MapFS) { without(files, facts.GPU{Address: migtest.Address, MIG: "disabled"}) }, ""},
		"NVML lists no places":      {func(files fstest.MapFS) { without(files, facts.GPU{Address: migtest.Address, MIG: "enabled"}) }, `GPU 0000:1b:00.0 has no place "1g.10gb@0"`},
		"NVML does not speak of it": {func(files fstest.MapFS) { without(files) }, `NVML does not speak of GPU "0000:1b:00.0"`},
	} {
		t.Run(name, func(t *testing.T) {
			files := maps.Clone(gpu.Files())
			test.change(files)
			work, err := nvidia.Family.Remove(&discovery.Host{FS: files}, tools, made)
			if work != nil && err == nil {
				err = work(t.Context())
			}
			got := ""
			if err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("error %q, want %q", got, test.want)
			}
		})
	}
}
