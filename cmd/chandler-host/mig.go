//go:build cgo

package main

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"chandler.dev/discovery/families/nvidia/facts"
)

// readMIG reads the MIG mode of a GPU, its instances, and its possible instances. If NVML
// temporarily does not answer, for example while the driver is busy, the last values remain:
// otherwise, a GPU in MIG mode would appear as a whole one, or an instance would disappear.
func (r *reader) readMIG(g *gpu, now *facts.GPU) {
	if !r.has("nvmlDeviceGetMigMode") {
		return
	}
	mode, _, ret := g.device.GetMigMode()
	switch ret {
	case nvml.SUCCESS:
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_FUNCTION_NOT_FOUND:
		return // the GPU has no MIG mode
	default:
		now.MIG, now.Instances, now.Profiles, now.Empty, now.PlacesUnknown = g.last.MIG, g.last.Instances, g.last.Profiles, g.last.Empty, g.last.PlacesUnknown
		return
	}
	now.MIG = "disabled"
	if mode != nvml.DEVICE_MIG_ENABLE {
		return
	}
	now.MIG = "enabled"
	if g.kinds == nil {
		var told bool
		if g.kinds, told = listKinds(r.lib, g.device, uint64(now.MemoryBytes)); !told {
			g.kinds, now.PlacesUnknown = nil, true
		}
	}
	r.readInstances(g, now)
	r.readPlacements(g, now)
}

// isTransient reports whether NVML may answer later. Other errors persist until the driver or this
// program's permissions change.
func isTransient(ret nvml.Return) bool {
	switch ret {
	case nvml.SUCCESS, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_FUNCTION_NOT_FOUND,
		nvml.ERROR_NO_PERMISSION, nvml.ERROR_NOT_FOUND:
		return false
	}
	return true
}

// readInstances reads the instances of a GPU in MIG mode.
func (r *reader) readInstances(g *gpu, now *facts.GPU) {
	count, ret := g.device.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		now.Instances = g.last.Instances
		return
	}
	for i := range count {
		mig, ret := g.device.GetMigDeviceHandleByIndex(i)
		if ret == nvml.ERROR_NOT_FOUND || ret == nvml.ERROR_INVALID_ARGUMENT {
			continue // the indices have gaps
		}
		if ret != nvml.SUCCESS {
			before := slices.IndexFunc(g.last.Instances, func(last facts.Instance) bool { return last.Index != nil && *last.Index == i })
			if before >= 0 {
				now.Instances = append(now.Instances, g.last.Instances[before])
			}
			continue
		}
		if instance, ok := r.readInstance(g, mig, now); ok {
			instance.Index = &i
			now.Instances = append(now.Instances, instance)
		}
	}
}

// readInstance describes a MIG device of a GPU, as far as its properties are known. It returns
// false if the instance IDs are unknown.
func (r *reader) readInstance(g *gpu, mig nvml.Device, now *facts.GPU) (facts.Instance, bool) {
	gpuMemory := uint64(now.MemoryBytes)
	gi, giRet := mig.GetGpuInstanceId()
	ci, ciRet := mig.GetComputeInstanceId()
	if giRet != nvml.SUCCESS || ciRet != nvml.SUCCESS {
		return facts.Instance{}, false
	}
	instance := facts.Instance{GI: gi, CI: ci}
	if uuid, ret := mig.GetUUID(); ret == nvml.SUCCESS {
		instance.UUID = uuid
	}
	listed, told := g.readPlacement(&instance)
	if !told {
		before := slices.IndexFunc(g.last.Instances, func(i facts.Instance) bool {
			return i.GI == gi && i.CI == ci && i.UUID == instance.UUID && i.Placement != nil
		})
		if before >= 0 {
			return g.last.Instances[before], true
		}
		now.PlacesUnknown = true
	}
	attributes, ret := mig.GetAttributes()
	if ret != nvml.SUCCESS {
		return instance, true
	}
	instance.MemoryBytes = int64(attributes.MemorySizeMB) << 20
	instance.Engines = &facts.Engines{
		Multiprocessors: attributes.MultiprocessorCount,
		Copy:            attributes.SharedCopyEngineCount,
		Decoder:         attributes.SharedDecoderCount,
		Encoder:         attributes.SharedEncoderCount,
		JPEG:            attributes.SharedJpegCount,
		OFA:             attributes.SharedOfaCount,
	}
	if listed != nil {
		instance.Profile = computeProfile(attributes, listed.profile.Name)
	} else if suffix, ok := r.suffix(g.device, mig, gi); ok && gpuMemory > 0 {
		instance.Profile = profile(attributes, gpuMemory) + suffix
	}
	return instance, true
}

// profile returns the name of an instance's profile without the suffix after its memory: "1g.10gb",
// or "1c.3g.40gb" if the instance computes in one slice of three. The memory is in eighths of the
// GPU's, in GiB, as in NVIDIA's device plugin.
func profile(a nvml.DeviceAttributes, gpuMemory uint64) string {
	const eighths, gib = 8, 1 << 30
	share := math.Ceil(float64(a.MemorySizeMB<<20)/float64(gpuMemory)*eighths) / eighths
	memory := math.Round(share * float64((gpuMemory+gib-1)/gib))
	return computeProfile(a, fmt.Sprintf("%dg.%dgb", a.GpuInstanceSliceCount, int(memory)))
}

// computeProfile returns the profile name of an instance, from the profile name of its GPU
// instance.
func computeProfile(a nvml.DeviceAttributes, name string) string {
	if a.ComputeInstanceSliceCount != a.GpuInstanceSliceCount {
		return fmt.Sprintf("%dc.%s", a.ComputeInstanceSliceCount, name)
	}
	return name
}

// suffixes are the suffixes after the memory in profile names (NVML_GPU_INSTANCE_PROFILE_* in
// nvml.h): media engines, all media engines, graphics, or no media engine. Other profiles have no
// suffix.
var suffixes = map[int]string{
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1:   "+me",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:   "+me",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: "+me.all",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: "+me.all",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME:  "-me",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:  "-me",
}

// suffix returns the suffix after the memory in the name of an instance's profile, and whether it
// is known. NVML's name of the instance ends with the profile name. Otherwise, the GPU instance's
// profile has the suffix.
func (r *reader) suffix(device, mig nvml.Device, gi int) (string, bool) {
	if name, ret := mig.GetName(); ret == nvml.SUCCESS {
		if _, named, ok := strings.Cut(name, " MIG "); ok {
			if _, suffix, ok := strings.Cut(named, "gb"); ok {
				return strings.ReplaceAll(suffix, ",", "."), true
			}
		}
	}
	handle, ret := device.GetGpuInstanceById(gi)
	if ret != nvml.SUCCESS {
		return "", false
	}
	info, ret := handle.GetInfo()
	if ret != nvml.SUCCESS {
		return "", false
	}
	for i := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		if known, ret := device.GetGpuInstanceProfileInfo(i); ret == nvml.SUCCESS && known.Id == info.ProfileId {
			return suffixes[i], true
		}
	}
	return "", false
}

// readPlacement sets the placement of an instance, if known, and returns its profile among the
// listed ones, or nil. NVML gives the placement only to privileged processes. told is false if NVML
// may answer later.
func (g *gpu) readPlacement(instance *facts.Instance) (listed *kind, told bool) {
	handle, ret := g.device.GetGpuInstanceById(instance.GI)
	if ret != nvml.SUCCESS {
		return nil, !isTransient(ret)
	}
	info, ret := handle.GetInfo()
	if ret != nvml.SUCCESS || info.Placement.Size == 0 {
		return nil, !isTransient(ret)
	}
	instance.Placement = &facts.Placement{Start: int(info.Placement.Start), Size: int(info.Placement.Size)}
	for i := range g.kinds {
		if g.kinds[i].info.Id == info.ProfileId {
			return &g.kinds[i], true
		}
	}
	return nil, true
}

// kind is a profile in NVML's form and in ours.
type kind struct {
	info    nvml.GpuInstanceProfileInfo
	profile facts.Profile
}

// readPlacements reads the possible instances of a GPU in MIG mode, and the placements of GPU
// instances without compute instances.
func (r *reader) readPlacements(g *gpu, now *facts.GPU) {
	for _, k := range g.kinds {
		now.Profiles = append(now.Profiles, k.profile)
		instances, ret := g.device.GetGpuInstances(&k.info)
		if ret != nvml.SUCCESS {
			continue
		}
		for _, instance := range instances {
			info, ret := instance.GetInfo()
			computes := slices.ContainsFunc(now.Instances, func(i facts.Instance) bool { return i.GI == int(info.Id) })
			if ret == nvml.SUCCESS && !computes {
				at := facts.Placement{Start: int(info.Placement.Start), Size: int(info.Placement.Size)}
				now.Empty = append(now.Empty, facts.Empty{Placement: at, Profile: k.profile.Name})
			}
		}
	}
}

// listKinds returns the profiles of a GPU with the given memory. There are none if the library is
// too old to create instances at a chosen placement, or does not list placements to this program.
// Profiles without a possible instance are left out. told is false if NVML may answer later.
func listKinds(lib nvml.Interface, device nvml.Device, gpuMemory uint64) (all []kind, told bool) {
	for _, function := range []string{"nvmlDeviceGetGpuInstancePossiblePlacements_v2", "nvmlDeviceCreateGpuInstanceWithPlacement"} {
		if lib.Extensions().LookupSymbol(function) != nil {
			return nil, true
		}
	}
	if gpuMemory == 0 { // profile names depend on the memory
		return nil, false
	}
	named := make(map[string]bool)
	for i := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := device.GetGpuInstanceProfileInfo(i)
		if isTransient(ret) {
			return nil, false
		}
		if ret != nvml.SUCCESS || info.InstanceCount == 0 || info.SliceCount == 0 {
			continue
		}
		placements, ret := device.GetGpuInstancePossiblePlacements(&info)
		if isTransient(ret) {
			return nil, false
		}
		if ret != nvml.SUCCESS {
			continue
		}
		p := facts.Profile{
			Name: profile(nvml.DeviceAttributes{
				GpuInstanceSliceCount: info.SliceCount, ComputeInstanceSliceCount: info.SliceCount, MemorySizeMB: info.MemorySizeMB,
			}, gpuMemory) + suffixes[i],
			Slices: int(info.SliceCount), Max: int(info.InstanceCount), MemoryBytes: int64(info.MemorySizeMB) << 20,
			Engines: facts.Engines{
				Multiprocessors: info.MultiprocessorCount, Copy: info.CopyEngineCount, Decoder: info.DecoderCount,
				Encoder: info.EncoderCount, JPEG: info.JpegCount, OFA: info.OfaCount,
			},
		}
		for _, placement := range placements {
			p.Placements = append(p.Placements, facts.Placement{Start: int(placement.Start), Size: int(placement.Size)})
		}
		if !named[p.Name] && len(placements) > 0 {
			named[p.Name] = true
			all = append(all, kind{info, p})
		}
	}
	return all, true
}
