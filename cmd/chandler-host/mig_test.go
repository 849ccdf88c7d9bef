//go:build cgo

package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/google/go-cmp/cmp"

	"chandler.dev/cmd/chandler-host/mocked"
)

// Each GPU's profiles have NVIDIA's names, and the placements of NVIDIA's guide.
func TestProfiles(t *testing.T) {
	for _, test := range []struct {
		config gpus.Config
		want   string
	}{
		{gpus.A100_SXM4_40GB, "1g.5gb[0 1 2 3 4 5 6]*1 2g.10gb[0 2 4]*2 3g.20gb[0 4]*4 4g.20gb[0]*4 7g.40gb[0]*8 1g.5gb+me[0 1 2 3 4 5 6]*1 1g.10gb[0 2 4 6]*2"},
		{gpus.H100_SXM5_80GB, "1g.10gb[0 1 2 3 4 5 6]*1 2g.20gb[0 2 4]*2 3g.40gb[0 4]*4 4g.40gb[0]*4 7g.80gb[0]*8 1g.10gb+me[0 1 2 3 4 5 6]*1 1g.20gb[0 2 4 6]*2"},
		{gpus.B200_SXM5_180GB, "1g.23gb[0 1 2 3 4 5 6]*1 2g.45gb[0 2 4]*2 3g.90gb[0 4]*4 4g.90gb[0]*4 7g.180gb[0]*8 1g.23gb+me[0 1 2 3 4 5 6]*1 1g.45gb[0 2 4 6]*2"},
	} {
		m := machine(t, test.config)
		r, err := newReader(m, []string{"0000:00:00.0"})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, p := range read(t, r)[0].Profiles {
			var starts []int
			for _, placement := range p.Placements {
				starts = append(starts, placement.Start)
			}
			got = append(got, fmt.Sprintf("%s%v*%d", p.Name, starts, p.Placements[0].Size))
		}
		if got := strings.Join(got, " "); got != test.want {
			t.Errorf("%s:\n got %s\nwant %s", test.config.Name, got, test.want)
		}
	}
}

// With an old driver, without MIG mode, and without an answer of NVML, there are no profiles, and
// no instance can be created.
func TestProfilesUnknown(t *testing.T) {
	for name, spoil := range map[string]func(m *mocked.Machine){
		"driver 450": func(m *mocked.Machine) {
			m.LookupSymbolFunc = func(symbol string) error {
				if strings.HasSuffix(symbol, "Placements_v2") {
					return os.ErrNotExist
				}
				return nil
			}
		},
		"not root": func(m *mocked.Machine) {
			device(m.Server, 0).GetGpuInstancePossiblePlacementsFunc = func(*nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return) {
				return nil, nvml.ERROR_NO_PERMISSION
			}
		},
		"whole": func(m *mocked.Machine) { device(m.Server, 0).MigMode = nvml.DEVICE_MIG_DISABLE },
	} {
		t.Run(name, func(t *testing.T) {
			m := machine(t, gpus.H100_SXM5_80GB)
			spoil(m)
			r, err := newReader(m, []string{"0000:00:00.0"})
			if err != nil {
				t.Fatal(err)
			}
			if got := read(t, r)[0].Profiles; len(got) > 0 {
				t.Errorf("profiles %v", got)
			}
			if _, err := do(m, options{create: "1g.10gb@0"}); err == nil {
				t.Error("an instance was created")
			}
		})
	}
}

// If NVML temporarily does not report how a GPU is partitioned, the last state remains: the GPU
// does not appear whole.
func TestModeIsNotToldForAMoment(t *testing.T) {
	for name, spoil := range map[string]func(d *server.Device){
		"the mode": func(d *server.Device) {
			d.GetMigModeFunc = func() (int, int, nvml.Return) { return 0, 0, nvml.ERROR_UNKNOWN }
		},
		"the memory": func(d *server.Device) {
			d.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.ERROR_UNKNOWN }
		},
		"the instances": func(d *server.Device) {
			d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_TIMEOUT }
		},
		"an instance": func(d *server.Device) {
			d.GetMigDeviceHandleByIndexFunc = func(int) (nvml.Device, nvml.Return) { return nil, nvml.ERROR_UNKNOWN }
		},
		"an instance's place": func(d *server.Device) {
			d.GetGpuInstanceByIdFunc = func(int) (nvml.GpuInstance, nvml.Return) { return nil, nvml.ERROR_UNKNOWN }
		},
		"the GPU at all": func(d *server.Device) {
			d.GetMigModeFunc = func() (int, int, nvml.Return) { return 0, 0, nvml.ERROR_GPU_IS_LOST }
		},
		"its GPU instances": func(d *server.Device) {
			d.GetGpuInstancesFunc = func(*nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstance, nvml.Return) { return nil, nvml.ERROR_UNKNOWN }
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := machine(t, gpus.A100_SXM4_40GB)
			r, err := newReader(m, []string{"0000:00:00.0"})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := do(m, options{create: "2g.10gb@2"}); err != nil {
				t.Fatal(err)
			}
			before := read(t, r)[0]
			spoil(device(m.Server, 0))
			if diff := cmp.Diff(before, read(t, r)[0]); diff != "" {
				t.Errorf("-before +now:\n%s", diff)
			}
		})
	}
}

// If NVML does not yet report placements after the program's start, the placements are reported as
// unknown rather than as an empty list: the names of instances depend on them.
func TestPlacesAreNotToldForAMoment(t *testing.T) {
	for name, spoil := range map[string]func(d *server.Device){
		"a profile": func(d *server.Device) {
			d.GetGpuInstanceProfileInfoFunc = func(int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
				return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_TIMEOUT
			}
		},
		"placements of one profile": func(d *server.Device) {
			of := d.GetGpuInstancePossiblePlacementsFunc
			d.GetGpuInstancePossiblePlacementsFunc = func(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return) {
				if info.SliceCount == 2 {
					return nil, nvml.ERROR_UNKNOWN
				}
				return of(info)
			}
		},
		"the memory": func(d *server.Device) {
			d.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.ERROR_UNKNOWN }
		},
		"the instance's place": func(d *server.Device) {
			d.GetGpuInstanceByIdFunc = func(int) (nvml.GpuInstance, nvml.Return) { return nil, nvml.ERROR_UNKNOWN }
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := machine(t, gpus.A100_SXM4_40GB)
			if _, err := do(m, options{create: "2g.10gb@2"}); err != nil {
				t.Fatal(err)
			}
			r, err := newReader(m, []string{"0000:00:00.0"})
			if err != nil {
				t.Fatal(err)
			}
			d := device(m.Server, 0)
			info, placements, memory, byID := d.GetGpuInstanceProfileInfoFunc, d.GetGpuInstancePossiblePlacementsFunc, d.GetMemoryInfoFunc, d.GetGpuInstanceByIdFunc
			spoil(d)
			if got := read(t, r)[0]; !got.PlacesUnknown || got.MIG != "enabled" || len(got.Instances) != 1 || got.Instances[0].UUID == "" {
				t.Errorf("it does not answer, and is said to have told %+v", got)
			}
			d.GetGpuInstanceProfileInfoFunc, d.GetGpuInstancePossiblePlacementsFunc, d.GetMemoryInfoFunc, d.GetGpuInstanceByIdFunc = info, placements, memory, byID
			if got := read(t, r)[0]; got.PlacesUnknown || len(got.Profiles) != 7 || got.Instances[0].Placement == nil {
				t.Errorf("it answers, and is said to have told %+v", got)
			}
		})
	}
}

// NVML may list profiles without a possible instance on this GPU. They are left out, and do not
// affect others.
func TestKindsOfNone(t *testing.T) {
	m := machine(t, gpus.A100_SXM4_40GB)
	d := device(m.Server, 0)
	of := d.GetGpuInstanceProfileInfoFunc
	d.GetGpuInstanceProfileInfoFunc = func(i int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
		info, ret := of(i)
		if i == nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2 {
			info.InstanceCount = 0
		}
		return info, ret
	}
	list := d.GetGpuInstancesFunc
	d.GetGpuInstancesFunc = func(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstance, nvml.Return) {
		if info.InstanceCount == 0 {
			return nil, nvml.ERROR_INVALID_ARGUMENT // the answer of NVIDIA's binding
		}
		return list(info)
	}
	r, err := newReader(m, []string{"0000:00:00.0"})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range read(t, r)[0].Profiles {
		if p.Name == "1g.10gb" {
			t.Errorf("profile %+v", p)
		}
	}
	if _, err := do(m, options{create: "1g.5gb@0"}); err != nil {
		t.Error(err)
	}
}

// An instance has the name of its listed profile, whatever name NVML gives the instance: its
// creator searches for that name.
func TestInstanceIsOfTheProfileListed(t *testing.T) {
	m := machine(t, gpus.A100_SXM4_40GB)
	d := device(m.Server, 0)
	of := d.GetMigDeviceHandleByIndexFunc
	d.GetMigDeviceHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		handle, ret := of(i)
		if ret == nvml.SUCCESS {
			mig := handle.(*mock.Device)
			attributes, _ := mig.GetAttributesFunc()
			attributes.MemorySizeMB += 1024
			mig.GetAttributesFunc = func() (nvml.DeviceAttributes, nvml.Return) { return attributes, nvml.SUCCESS }
			mig.GetNameFunc = func() (string, nvml.Return) { return "NVIDIA A100 MIG 1g.5gb+ME", nvml.SUCCESS }
		}
		return handle, ret
	}
	r, err := newReader(m, []string{"0000:00:00.0"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := do(m, options{create: "1g.5gb+me@1"}); err != nil {
		t.Fatal(err)
	}
	if got := read(t, r)[0].Instances; len(got) != 1 || got[0].Profile != "1g.5gb+me" {
		t.Errorf("instances %+v", got)
	}
}
