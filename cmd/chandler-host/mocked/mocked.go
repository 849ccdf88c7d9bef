//go:build cgo

// Package mocked simulates a machine with NVIDIA's own GPU mocks, for tests. The mocks alone accept
// any MIG instance. Package mocked follows the driver's rules: instances lie at listed and free
// placements, fit into the GPU, and are removed only when no process uses them. The state is in
// files, together with the kernel driver's files about MIG instances, so that several processes
// share a machine.
package mocked

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
)

// Machine is a machine with GPUs in MIG mode at 0000:00:00.0, 0000:01:00.0 and so on.
type Machine struct {
	*server.Server

	// Before is called before an instance is created or removed, with "create-gi", "create-ci",
	// "destroy-ci" or "destroy-gi". Unless it returns SUCCESS, the operation does nothing and
	// returns the same value.
	Before func(step string) nvml.Return

	dir string
}

// Instance is a GPU instance of a GPU.
type Instance struct {
	GI, Start, Size int
	Profile         int    // one of nvml.GPU_INSTANCE_PROFILE_*
	Parts           []Part // its compute instances
}

// Part is a compute instance.
type Part struct {
	CI, Profile int
	UUID        string
	Busy        bool // a process runs in it
}

// state is the content of the state file, by the number of the GPU.
type state struct {
	Made      int // number of compute instances ever created
	Instances map[int][]Instance
}

// New returns a machine with its files below dir: its state, and proc.
func New(dir string, configs ...gpus.Config) (*Machine, error) {
	s, err := server.New(server.WithGPUs(configs...), server.WithDriverVersion("570.86.15"), server.WithNVMLVersion("12.570.86.15"), server.WithCUDADriverVersion(12080))
	if err != nil {
		return nil, err
	}
	m := &Machine{Server: s, Before: func(string) nvml.Return { return nvml.SUCCESS }, dir: dir}
	s.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) { return nil, nvml.ERROR_NOT_SUPPORTED }
	for i := range s.Devices {
		m.wrapGPU(i)
	}
	return m, m.changeState(func(*state) nvml.Return { return nvml.SUCCESS })
}

// device returns a GPU by its number.
func (m *Machine) device(gpu int) *server.Device { return m.Devices[gpu].(*server.Device) }

// wrapGPU replaces a GPU's functions.
func (m *Machine) wrapGPU(gpu int) {
	d := m.device(gpu)
	d.UUID = fmt.Sprintf("GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9a%04x", gpu) // the same in each process
	d.MigMode = nvml.DEVICE_MIG_ENABLE
	d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) { return nvml.GpuFabricInfo{}, nvml.ERROR_NOT_SUPPORTED }
	d.GetNvLinkStateFunc = func(int) (nvml.EnableState, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
	d.GetFieldValuesFunc = func([]nvml.FieldValue) nvml.Return { return nvml.ERROR_NOT_SUPPORTED }
	d.GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
	d.GetGpuInstanceProfileInfoFunc = func(i int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
		if _, found := d.Config.MIGProfiles.GpuInstanceProfiles[i]; !found {
			return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
		}
		info, _ := m.profile(gpu, i)
		return info, nvml.SUCCESS
	}
	d.GetGpuInstancePossiblePlacementsFunc = func(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return) {
		return m.Placements(gpu, index(info.Id)), nvml.SUCCESS
	}
	d.CreateGpuInstanceFunc = nil // the driver's own choice can differ from the scheduler's
	d.CreateGpuInstanceWithPlacementFunc = func(info *nvml.GpuInstanceProfileInfo, at *nvml.GpuInstancePlacement) (nvml.GpuInstance, nvml.Return) {
		return m.createGI(gpu, index(info.Id), int(at.Start), int(at.Size))
	}
	d.GetGpuInstancesFunc = func(info *nvml.GpuInstanceProfileInfo) (found []nvml.GpuInstance, _ nvml.Return) {
		for _, one := range m.Instances(gpu) {
			if one.Profile == index(info.Id) {
				found = append(found, m.gpuInstance(gpu, one.GI))
			}
		}
		return found, nvml.SUCCESS
	}
	d.GetGpuInstanceByIdFunc = func(gi int) (nvml.GpuInstance, nvml.Return) {
		if !slices.ContainsFunc(m.Instances(gpu), func(one Instance) bool { return one.GI == gi }) {
			return nil, nvml.ERROR_NOT_FOUND
		}
		return m.gpuInstance(gpu, gi), nvml.SUCCESS
	}
	d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	d.GetMigDeviceHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) { return m.migDevice(gpu, i) }
}

// id returns the number of a profile for creating instances. As with the driver, queries of the
// profile use another number.
func id(profile int) uint32 { return uint32(40 - profile) }

func index(id uint32) int { return 40 - int(id) }

// profile returns a profile, and the number of memory slices of its instances: one for each eighth
// of the GPU's memory. Some mocks have slightly more memory than that.
func (m *Machine) profile(gpu, profile int) (info nvml.GpuInstanceProfileInfo, size uint32) {
	d := m.device(gpu)
	eighth := d.Config.MemoryMB / 8
	info = d.Config.MIGProfiles.GpuInstanceProfiles[profile]
	slices := (info.MemorySizeMB + eighth/2) / eighth
	info.Id, info.MemorySizeMB = id(profile), min(info.MemorySizeMB, slices*eighth)
	return info, uint32(slices)
}

// Placements returns the possible placements of a profile's instances. Instances of two slices
// begin at even ones, by NVIDIA's MIG User Guide. Some mocks have fewer slices than their memory
// needs.
func (m *Machine) Placements(gpu, profile int) (listed []nvml.GpuInstancePlacement) {
	d := m.device(gpu)
	_, size := m.profile(gpu, profile)
	add := func(start uint32) {
		if start%min(size, 2) == 0 && start+size <= 8 {
			listed = append(listed, nvml.GpuInstancePlacement{Start: start, Size: size})
		}
	}
	for _, placement := range d.Config.MIGProfiles.GpuInstancePlacements[profile] {
		add(placement.Start)
	}
	return listed
}

// Instances returns the GPU instances of a GPU.
func (m *Machine) Instances(gpu int) (all []Instance) {
	_ = m.changeState(func(s *state) nvml.Return {
		all = s.Instances[gpu]
		return nvml.ERROR_NO_DATA // write nothing
	})
	return all
}

// Run simulates the start or the end of a process in a MIG device.
func (m *Machine) Run(uuid string, runs bool) error {
	return m.changeState(func(s *state) nvml.Return {
		for _, instances := range s.Instances {
			for i := range instances {
				for j := range instances[i].Parts {
					if part := &instances[i].Parts[j]; part.UUID == uuid {
						part.Busy = runs
						return nvml.SUCCESS
					}
				}
			}
		}
		return nvml.ERROR_NOT_FOUND
	})
}

// changeState changes the state, unless the function returns something other than SUCCESS.
func (m *Machine) changeState(change func(s *state) nvml.Return) error {
	if ret := m.do("", change); ret != nvml.SUCCESS {
		return ret
	}
	return nil
}

func (m *Machine) do(step string, change func(s *state) nvml.Return) nvml.Return {
	if step != "" {
		if ret := m.Before(step); ret != nvml.SUCCESS {
			return ret
		}
	}
	file, err := os.OpenFile(filepath.Join(m.dir, "mig.json"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nvml.ERROR_UNKNOWN
	}
	defer file.Close()
	if syscall.Flock(int(file.Fd()), syscall.LOCK_EX) != nil {
		return nvml.ERROR_UNKNOWN
	}
	s := &state{Instances: make(map[int][]Instance)}
	if err := json.NewDecoder(file).Decode(s); err != nil {
		s = &state{Instances: make(map[int][]Instance)} // a new one
	}
	if ret := change(s); ret != nvml.SUCCESS {
		return ret
	}
	text, err := json.Marshal(s)
	if err == nil {
		err = errors.Join(file.Truncate(0), writeAt(file, text), m.showInstances(s))
	}
	if err != nil {
		return nvml.ERROR_UNKNOWN
	}
	return nvml.SUCCESS
}

func writeAt(file *os.File, text []byte) error {
	_, err := file.WriteAt(text, 0)
	return err
}

// showInstances writes the kernel driver's files about MIG instances.
func (m *Machine) showInstances(s *state) error {
	var errs []error
	for gpu := range m.Devices {
		mig := filepath.Join(m.dir, fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig", gpu))
		wanted := make(map[string]int) // the minor numbers of nodes, by directory
		for _, one := range s.Instances[gpu] {
			dir := filepath.Join(mig, fmt.Sprintf("gi%d", one.GI))
			wanted[dir] = 100*gpu + 10*one.GI + 3
			for _, part := range one.Parts {
				wanted[filepath.Join(dir, fmt.Sprintf("ci%d", part.CI))] = wanted[dir] + 1 + part.CI
			}
		}
		errs = append(errs, os.MkdirAll(mig, 0o755))
		var there []string
		errs = append(errs, filepath.WalkDir(mig, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() && path != mig {
				there = append(there, path)
			}
			return err
		}))
		slices.SortFunc(there, func(a, b string) int { return cmp.Compare(b, a) }) // inner directories first
		for _, dir := range there {
			if _, found := wanted[dir]; !found {
				errs = append(errs, os.RemoveAll(dir))
			}
		}
		for dir, minor := range wanted {
			errs = append(errs, showAccess(dir, minor))
		}
	}
	return errors.Join(errs...)
}

// showAccess writes the file with the number of an instance's node. An existing file stays
// unchanged, because other processes read it. The kernel never shows an empty file.
func showAccess(dir string, minor int) error {
	name := filepath.Join(dir, "access")
	if _, err := os.Stat(name); err == nil {
		return nil
	}
	err := errors.Join(os.MkdirAll(dir, 0o755),
		os.WriteFile(name+"~", fmt.Appendf(nil, "DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor), 0o444))
	if err != nil {
		return err
	}
	return os.Rename(name+"~", name)
}

// uuid returns the UUID of a MIG device, a new one each time.
func uuid(gpu, gi, made int) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d/%d/%d", gpu, gi, made))
	return fmt.Sprintf("MIG-%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

// migDevice returns a MIG device by its number on the GPU.
func (m *Machine) migDevice(gpu, number int) (nvml.Device, nvml.Return) {
	d := m.device(gpu)
	for _, one := range m.Instances(gpu) {
		info, _ := m.profile(gpu, one.Profile)
		for _, part := range one.Parts {
			if number--; number >= 0 {
				continue
			}
			compute := d.Config.MIGProfiles.ComputeInstanceProfiles[one.Profile][part.Profile]
			return &mock.Device{
				GetNameFunc:              func() (string, nvml.Return) { return d.Config.Name, nvml.SUCCESS },
				GetUUIDFunc:              func() (string, nvml.Return) { return part.UUID, nvml.SUCCESS },
				GetGpuInstanceIdFunc:     func() (int, nvml.Return) { return one.GI, nvml.SUCCESS },
				GetComputeInstanceIdFunc: func() (int, nvml.Return) { return part.CI, nvml.SUCCESS },
				GetAttributesFunc: func() (nvml.DeviceAttributes, nvml.Return) {
					return nvml.DeviceAttributes{
						GpuInstanceSliceCount: info.SliceCount, ComputeInstanceSliceCount: compute.SliceCount, MemorySizeMB: info.MemorySizeMB,
						MultiprocessorCount: compute.MultiprocessorCount, SharedCopyEngineCount: info.CopyEngineCount,
						SharedDecoderCount: info.DecoderCount, SharedEncoderCount: info.EncoderCount, SharedJpegCount: info.JpegCount, SharedOfaCount: info.OfaCount,
					}, nvml.SUCCESS
				},
			}, nvml.SUCCESS
		}
	}
	return nil, nvml.ERROR_NOT_FOUND
}
