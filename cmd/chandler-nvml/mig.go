//go:build cgo

package main

import (
	"fmt"
	"math"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"chandler.dev/discovery/families/nvidia/facts"
)

// readMIG reads the MIG mode of a GPU and its instances.
func (r *reader) readMIG(device nvml.Device, now *facts.GPU) {
	if !r.has("nvmlDeviceGetMigMode") {
		return
	}
	mode, _, ret := device.GetMigMode()
	if ret != nvml.SUCCESS {
		return // it has no such mode
	}
	now.MIG = "disabled"
	if mode != nvml.DEVICE_MIG_ENABLE {
		return
	}
	now.MIG = "enabled"
	count, ret := device.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return
	}
	for i := range count {
		// There are gaps in the numbers.
		mig, ret := device.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue
		}
		if instance, ok := r.instance(device, mig, uint64(now.MemoryBytes)); ok {
			instance.Index = &i
			now.Instances = append(now.Instances, instance)
		}
	}
}

// instance describes a MIG device of a GPU with that much memory. It is nothing
// if its place is not known.
func (r *reader) instance(device, mig nvml.Device, gpuMemory uint64) (facts.Instance, bool) {
	gi, giRet := mig.GetGpuInstanceId()
	ci, ciRet := mig.GetComputeInstanceId()
	if giRet != nvml.SUCCESS || ciRet != nvml.SUCCESS {
		return facts.Instance{}, false
	}
	instance := facts.Instance{GI: gi, CI: ci}
	if uuid, ret := mig.GetUUID(); ret == nvml.SUCCESS {
		instance.UUID = uuid
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
	if suffix, ok := r.suffix(device, mig, gi); ok && gpuMemory > 0 {
		instance.Profile = profile(attributes, gpuMemory) + suffix
	}
	return instance, true
}

// profile returns the name of the profile of an instance without what follows
// its memory: "1g.10gb", or "1c.3g.40gb" if it computes in one slice of three.
// The memory is in eighths of the GPU's, in GiB, as NVIDIA's plugin has it.
func profile(a nvml.DeviceAttributes, gpuMemory uint64) string {
	const eighths, gib = 8, 1 << 30
	share := math.Ceil(float64(a.MemorySizeMB<<20)/float64(gpuMemory)*eighths) / eighths
	memory := math.Round(share * float64((gpuMemory+gib-1)/gib))
	name := fmt.Sprintf("%dg.%dgb", a.GpuInstanceSliceCount, int(memory))
	if a.ComputeInstanceSliceCount != a.GpuInstanceSliceCount {
		name = fmt.Sprintf("%dc.%s", a.ComputeInstanceSliceCount, name)
	}
	return name
}

// suffixes are what follows the memory in the names of profiles
// (NVML_GPU_INSTANCE_PROFILE_* in nvml.h): media engines, all of them, graphics,
// or no media engine. The others have none.
var suffixes = map[int]string{
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1:   "+me",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:   "+me",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: "+me.all",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: "+me.all",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:    "+gfx",
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME:  "-me",
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:  "-me",
}

// suffix returns what follows the memory in the name of an instance's profile,
// and whether it is known: NVML's name of the instance ends with that of the
// profile, and else the profile is the one of the GPU instance.
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
