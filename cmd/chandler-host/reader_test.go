//go:build cgo

package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery/families/nvidia/facts"
)

// dgx returns a DGX with eight A100 of 40 GiB, at 0000:00:00.0 to 0000:07:00.0. Its NVML lacks the
// functions in without.
func dgx(t *testing.T, without ...string) (*server.Server, *reader) {
	t.Helper()
	s := dgxa100.New()
	s.LookupSymbolFunc = func(symbol string) error {
		if slices.Contains(without, symbol) {
			return errors.New("not there")
		}
		return nil
	}
	var addresses []string
	for i := range s.Devices {
		d := device(s, i)
		addresses = append(addresses, d.PciBusID)
		d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) { return nvml.GpuFabricInfo{}, nvml.ERROR_NOT_SUPPORTED }
		d.GetNvLinkStateFunc = func(int) (nvml.EnableState, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
		d.GetFieldValuesFunc = func([]nvml.FieldValue) nvml.Return { return nvml.ERROR_NOT_SUPPORTED }
		d.GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
	}
	r, err := newReader(s, addresses)
	if err != nil {
		t.Fatal(err)
	}
	return s, r
}

func device(s *server.Server, i int) *server.Device { return s.Devices[i].(*server.Device) }

// read returns the written facts, in the order of the GPUs' addresses.
func read(t *testing.T, r *reader) []facts.GPU {
	t.Helper()
	var line bytes.Buffer
	if err := r.write(&line); err != nil {
		t.Fatal(err)
	}
	parsed, err := facts.Parse(line.String())
	if err != nil {
		t.Fatal(err)
	}
	gpus := make([]facts.GPU, len(r.gpus))
	for i, g := range r.gpus {
		gpus[i] = parsed[g.last.Address]
		if gpus[i].Err != nil {
			t.Errorf("the family would refuse it: %v", gpus[i].Err)
		}
	}
	return gpus
}

func TestReadWholeGPUs(t *testing.T) {
	s, r := dgx(t)
	gpus := read(t, r)
	for i, got := range gpus {
		want := facts.GPU{
			Address: device(s, i).PciBusID, UUID: device(s, i).UUID, Index: &i, Name: "Mock NVIDIA A100-SXM4-40GB",
			MemoryBytes: 40 << 30, ComputeCapability: "8.0", CUDA: "12.4", MIG: "disabled",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}

// Old drivers have fewer functions, and calling a missing one would end the program.
func TestReadCallsNoFunctionThatIsMissing(t *testing.T) {
	s, r := dgx(t, "nvmlSystemGetCudaDriverVersion", "nvmlDeviceGetMigMode", "nvmlDeviceGetGpuFabricInfo", "nvmlDeviceGetNvLinkRemoteDeviceType",
		"nvmlDeviceGetFieldValues", "nvmlEventSetCreate")
	s.SystemGetCudaDriverVersionFunc = func() (int, nvml.Return) { panic("called") }
	d := device(s, 0)
	d.GetMigModeFunc = func() (int, int, nvml.Return) { panic("called") }
	d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) { panic("called") }
	d.GetNvLinkRemoteDeviceTypeFunc = func(int) (nvml.IntNvLinkDeviceType, nvml.Return) { panic("called") }
	d.GetFieldValuesFunc = func([]nvml.FieldValue) nvml.Return { panic("called") }
	s.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) { panic("called") }
	if got := read(t, r)[0]; got.MIG != "" || got.MemoryBytes != 40<<30 {
		t.Errorf("got %+v", got)
	}
	if set := r.register(); set != nil {
		t.Errorf("events %v", set)
	}
}

// mig returns a MIG device of a GPU.
func mig(name string, gi, ci, g, c int, memoryMiB uint64) *mock.Device {
	return &mock.Device{
		GetNameFunc: func() (string, nvml.Return) { return name, nvml.SUCCESS },
		GetUUIDFunc: func() (string, nvml.Return) {
			return "MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e4" + string(rune('a'+gi)) + "0", nvml.SUCCESS
		},
		GetGpuInstanceIdFunc:     func() (int, nvml.Return) { return gi, nvml.SUCCESS },
		GetComputeInstanceIdFunc: func() (int, nvml.Return) { return ci, nvml.SUCCESS },
		GetAttributesFunc: func() (nvml.DeviceAttributes, nvml.Return) {
			return nvml.DeviceAttributes{
				GpuInstanceSliceCount: uint32(g), ComputeInstanceSliceCount: uint32(c), MemorySizeMB: memoryMiB,
				MultiprocessorCount: 14, SharedCopyEngineCount: 1, SharedDecoderCount: 2, SharedEncoderCount: 3, SharedJpegCount: 4, SharedOfaCount: 5,
			}, nvml.SUCCESS
		},
	}
}

func TestReadMIG(t *testing.T) {
	s, r := dgx(t)
	d := device(s, 2)
	d.MigMode = nvml.DEVICE_MIG_ENABLE
	handles := map[int]nvml.Device{
		0: mig("A100-SXM4-40GB MIG 1g.5gb", 1, 0, 1, 1, 4864),
		2: mig("A100-SXM4-40GB MIG 1g.5gb+me", 2, 0, 1, 1, 4864),
		5: mig("A100-SXM4-40GB", 3, 1, 3, 1, 19968), // a name without the profile
	}
	d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	d.GetMigDeviceHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		if handle, ok := handles[i]; ok {
			return handle, nvml.SUCCESS
		}
		return nil, nvml.ERROR_NOT_FOUND
	}
	d.GetGpuInstanceByIdFunc = func(int) (nvml.GpuInstance, nvml.Return) {
		return dgxa100.NewGpuInstance(nvml.GpuInstanceInfo{ProfileId: dgxa100.MIGProfiles.GpuInstanceProfiles[nvml.GPU_INSTANCE_PROFILE_3_SLICE].Id}), nvml.SUCCESS
	}
	got := read(t, r)[2]
	engines := &facts.Engines{Multiprocessors: 14, Copy: 1, Decoder: 2, Encoder: 3, JPEG: 4, OFA: 5}
	want := []facts.Instance{
		{GI: 1, Index: new(0), UUID: "MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e4b0", Profile: "1g.5gb", MemoryBytes: 4864 << 20, Engines: engines},
		{GI: 2, Index: new(2), UUID: "MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e4c0", Profile: "1g.5gb+me", MemoryBytes: 4864 << 20, Engines: engines},
		{GI: 3, CI: 1, Index: new(5), UUID: "MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e4d0", Profile: "1c.3g.20gb", MemoryBytes: 19968 << 20, Engines: engines},
	}
	if diff := cmp.Diff(want, got.Instances); diff != "" || got.MIG != "enabled" {
		t.Errorf("mode %q, instances -want +got:\n%s", got.MIG, diff)
	}
	d.GetGpuInstanceByIdFunc = func(int) (nvml.GpuInstance, nvml.Return) { return nil, nvml.ERROR_NO_PERMISSION }
	if got := read(t, r)[2].Instances[2]; got.Profile != "" || got.UUID == "" {
		t.Errorf("of a profile that is not known: %+v", got)
	}
}

// The profile names are NVIDIA's, for every GPU that has them.
func TestProfile(t *testing.T) {
	const a100, a100x80, h100, h200, b200 = 40536 << 20, 81920 << 20, 81559 << 20, 143771 << 20, 183359 << 20
	for want, test := range map[string]struct {
		g, c      uint32
		mib, size uint64
	}{
		"1g.5gb": {1, 1, 4864, a100}, "7g.40gb": {7, 7, 40192, a100}, "1c.2g.10gb": {2, 1, 9856, a100},
		"1g.10gb": {1, 1, 9728, a100x80}, "1g.20gb": {1, 1, 19968, h100}, "3g.40gb": {3, 3, 40448, h100},
		"1g.18gb": {1, 1, 16384, h200}, "7g.141gb": {7, 7, 143360, h200}, "1g.23gb": {1, 1, 22016, b200},
	} {
		got := profile(nvml.DeviceAttributes{GpuInstanceSliceCount: test.g, ComputeInstanceSliceCount: test.c, MemorySizeMB: test.mib}, test.size)
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestReadFabricAndLinks(t *testing.T) {
	s, r := dgx(t)
	d := device(s, 1)
	d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
		return nvml.GpuFabricInfo{ClusterUuid: [16]uint8{0x0c, 0x1d, 15: 0x5f}, CliqueId: 7, State: nvml.GPU_FABRIC_STATE_COMPLETED}, nvml.SUCCESS
	}
	other := device(s, 0)
	other.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
		return nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_COMPLETED}, nvml.SUCCESS // a domain without a name
	}
	d.GetNvLinkStateFunc = func(link int) (nvml.EnableState, nvml.Return) {
		if link == 4 {
			return nvml.FEATURE_DISABLED, nvml.SUCCESS
		}
		return nvml.FEATURE_ENABLED, nvml.SUCCESS
	}
	d.GetNvLinkRemoteDeviceTypeFunc = func(link int) (nvml.IntNvLinkDeviceType, nvml.Return) {
		return map[int]nvml.IntNvLinkDeviceType{0: nvml.NVLINK_DEVICE_TYPE_SWITCH, 5: nvml.NVLINK_DEVICE_TYPE_UNKNOWN, 6: nvml.NVLINK_DEVICE_TYPE_SWITCH}[link], nvml.SUCCESS
	}
	d.GetNvLinkRemotePciInfoFunc = func(link int) (nvml.PciInfo, nvml.Return) {
		switch link {
		case 0:
			return nvml.PciInfo{Bus: 0xc4}, nvml.SUCCESS
		case 1, 2:
			return nvml.PciInfo{Bus: 3}, nvml.SUCCESS
		case 3:
			return nvml.PciInfo{Domain: 0x10000, Bus: 2}, nvml.SUCCESS
		case 4, 5:
			return nvml.PciInfo{Bus: 0xee}, nvml.SUCCESS
		case 6:
			return nvml.PciInfo{Domain: 0xffffffff, Bus: 0xff}, nvml.SUCCESS
		}
		return nvml.PciInfo{}, nvml.ERROR_NOT_SUPPORTED
	}
	gpus := read(t, r)
	got := facts.GPU{Fabric: gpus[1].Fabric, Peers: gpus[1].Peers, Switches: gpus[1].Switches}
	want := facts.GPU{
		Fabric: &facts.Fabric{Cluster: "0c1d0000-0000-0000-0000-00000000005f", Clique: 7},
		Peers:  []string{"0000:03:00.0", "10000:02:00.0"}, Switches: []string{"0000:c4:00.0"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if gpus[0].Fabric != nil {
		t.Errorf("a fabric without a name: %+v", gpus[0].Fabric)
	}
}

// recovering sets the driver's recovery action for a GPU.
func recovering(d *server.Device, action uint32) {
	d.GetFieldValuesFunc = func(values []nvml.FieldValue) nvml.Return {
		if values[0].FieldId != nvml.FI_DEV_GET_GPU_RECOVERY_ACTION {
			return nvml.ERROR_INVALID_ARGUMENT
		}
		values[0].ValueType = uint32(nvml.VALUE_TYPE_UNSIGNED_INT)
		binary.NativeEndian.PutUint32(values[0].Value[:], action)
		return nvml.SUCCESS
	}
}

func xid(d *server.Device, code uint64, gi uint32) nvml.EventData {
	return nvml.EventData{Device: d, EventType: nvml.EventTypeXidCriticalError, EventData: code, GpuInstanceId: gi, ComputeInstanceId: gi}
}

// An error counts against a GPU until the driver requests no recovery action, or permanently if the
// driver does not report any.
func TestErrors(t *testing.T) {
	s, r := dgx(t)
	read(t, r)
	at := time.Now()
	for _, code := range []uint64{13, 31, 43, 45, 68, 94, 154} {
		r.noteXID(xid(device(s, 0), code, 0xffffffff), at)
	}
	r.noteXID(nvml.EventData{Device: device(s, 0), EventType: nvml.EventMigConfigChange, EventData: 48}, at)
	r.noteXID(xid(device(s, 1), 79, 0xffffffff), at)
	r.noteXID(xid(device(s, 1), 79, 0xffffffff), at)
	r.noteXID(xid(device(s, 2), 109, 3), at)
	r.noteXID(xid(device(s, 3), 119, 0xffffffff), at)
	recovering(device(s, 3), 0)
	gpus := read(t, r)
	if len(gpus[0].XIDs) > 0 || gpus[0].Recovery != "" {
		t.Errorf("an application's own errors: %+v", gpus[0])
	}
	if len(gpus[1].XIDs) != 1 || gpus[1].XIDs[0].Code != 79 || gpus[1].XIDs[0].GI != nil {
		t.Errorf("one error, twice: %+v", gpus[1].XIDs)
	}
	if len(gpus[2].XIDs) != 1 || *gpus[2].XIDs[0].GI != 3 {
		t.Errorf("an instance's error: %+v", gpus[2].XIDs)
	}
	if len(gpus[3].XIDs) > 0 || gpus[3].Recovery != "none" {
		t.Errorf("an error about which nothing is to be done: %+v", gpus[3])
	}
	recovering(device(s, 3), 1)
	if got := read(t, r)[3]; got.Recovery != "gpu-reset" || len(got.XIDs) != 1 {
		t.Errorf("the driver has made up its mind: %+v", got)
	}
	recovering(device(s, 3), 9)
	if got := read(t, r)[3]; got.Recovery != "action-9" {
		t.Errorf("a recovery that is not known yet: %+v", got)
	}
}

// An error of an unknown GPU counts against all GPUs.
func TestErrorOfAnUnknownProcess(t *testing.T) {
	_, r := dgx(t)
	read(t, r)
	r.noteXID(nvml.EventData{EventType: nvml.EventTypeXidCriticalError, EventData: 79, GpuInstanceId: 0xffffffff}, time.Now())
	for _, gpu := range read(t, r) {
		if len(gpu.XIDs) != 1 {
			t.Errorf("%s: %+v", gpu.Address, gpu.XIDs)
		}
	}
}

func TestErrorsAreBounded(t *testing.T) {
	s, r := dgx(t)
	read(t, r)
	for i := range uint32(100) {
		r.noteXID(xid(device(s, 0), 48, i), time.Now())
	}
	if got := read(t, r)[0].XIDs; len(got) != maxXIDs || *got[maxXIDs-1].GI != 99 {
		t.Errorf("%d errors", len(got))
	}
}

// A loaded driver without GPUs is not an error.
func TestReadNone(t *testing.T) {
	s, _ := dgx(t)
	r, err := newReader(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	if gpus := read(t, r); len(gpus) > 0 {
		t.Errorf("got %+v", gpus)
	}
}

// A lost GPU is still described by its last facts.
func TestLost(t *testing.T) {
	s, r := dgx(t)
	before := read(t, r)[4]
	device(s, 4).GetUUIDFunc = func() (string, nvml.Return) { return "", nvml.ERROR_GPU_IS_LOST }
	got := read(t, r)[4]
	before.Lost = true
	if diff := cmp.Diff(before, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	s.DeviceGetHandleByPciBusIdFunc = func(string) (nvml.Device, nvml.Return) { return nil, nvml.ERROR_GPU_IS_LOST }
	again, err := newReader(s, []string{"0000:04:00.0"})
	if err != nil {
		t.Fatal(err)
	}
	if got := read(t, again)[0]; !got.Lost {
		t.Errorf("lost from the beginning: %+v", got)
	}
	s.DeviceGetHandleByPciBusIdFunc = func(string) (nvml.Device, nvml.Return) { return nil, nvml.ERROR_NO_PERMISSION }
	if _, err := newReader(s, []string{"0000:04:00.0"}); err == nil || !strings.Contains(err.Error(), "0000:04:00.0: /dev/nvidia* cannot be opened") {
		t.Errorf("error %v", err)
	}
}

// Events are reported at once, and a change of the host's GPUs ends the watch.
func TestWatch(t *testing.T) {
	s, r := dgx(t)
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "0000:00:00.0"), 0o755); err != nil {
		t.Fatal(err)
	}
	waits := 0
	events := &mock.EventSet{WaitFunc: func(uint32) (nvml.EventData, nvml.Return) {
		waits++
		switch waits {
		case 1:
			return xid(device(s, 0), 79, 0xffffffff), nvml.SUCCESS
		case 4:
			if err := os.Mkdir(filepath.Join(dir, "0000:08:00.0"), 0o755); err != nil {
				t.Error(err)
			}
		}
		return nvml.EventData{}, nvml.ERROR_TIMEOUT
	}}
	s.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) { return events, nvml.SUCCESS }
	device(s, 0).GetSupportedEventTypesFunc = func() (uint64, nvml.Return) {
		return nvml.EventTypeXidCriticalError | nvml.EventTypeClock, nvml.SUCCESS
	}
	device(s, 0).RegisterEventsFunc = func(types uint64, _ nvml.EventSet) nvml.Return {
		if types != nvml.EventTypeXidCriticalError {
			t.Errorf("registered for %#x", types)
		}
		return nvml.SUCCESS
	}
	var out bytes.Buffer
	err := r.watchGPUs(&out, &options{gpus: dir, interval: eventWait})
	if err == nil || !strings.Contains(err.Error(), "other GPUs than before") {
		t.Errorf("error %v", err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 3 || strings.Contains(lines[0], `"xids"`) || !strings.Contains(lines[1], `"code":79`) {
		t.Errorf("%d lines: %s", len(lines), lines)
	}
}

// A request makes the program scan before the interval has passed.
func TestWatchAgain(t *testing.T) {
	for name, set := range map[string]nvml.EventSet{
		"without events": nil,
		"with events":    &mock.EventSet{WaitFunc: func(uint32) (nvml.EventData, nvml.Return) { return nvml.EventData{}, nvml.ERROR_TIMEOUT }},
	} {
		t.Run(name, func(t *testing.T) {
			_, r := dgx(t)
			o := options{again: make(chan struct{}, 1)}
			if err := o.readRequests(strings.NewReader("\n\n\n")); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if err := r.wait(set, time.Hour, o.again); err != nil || time.Since(began) > time.Minute {
				t.Errorf("waited for %s, error %v", time.Since(began), err)
			}
		})
	}
}
