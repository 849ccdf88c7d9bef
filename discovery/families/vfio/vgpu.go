package vfio

import (
	"strconv"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// manager is the NVIDIA driver. The driver serves as vfio driver for virtual functions that are
// vGPUs, and drives other functions for computing.
const manager = "nvidia"

// vgpuType is the attribute with the vGPU type of a virtual function under the NVIDIA driver. The
// value is 0 if the function is not a vGPU (NVIDIA's documentation of the vGPU software,
// "vendor-specific VFIO framework"; earlier vGPUs were mediated devices).
const vgpuType = "nvidia/current_vgpu_type"

// withoutOthers removes the functions of the NVIDIA driver that are not vGPUs.
func withoutOthers(functions []sysfs.Device) (ours []sysfs.Device, problems []discovery.Problem) {
	for _, function := range functions {
		kind, err := vgpuOf(function)
		problems = append(problems, discovery.Problems(discovery.DeviceName(function), err)...)
		if function.Driver() != manager || kind != "" {
			ours = append(ours, function)
		}
	}
	return ours, problems
}

// vgpuOf returns the vGPU type of a virtual function, "" if the function is not a vGPU.
func vgpuOf(function sysfs.Device) (string, error) {
	if function.Driver() != manager || !function.HasEntry("physfn") {
		return "", nil
	}
	attrs := function.Attrs()
	number, _ := attrs.Uint(vgpuType)
	if number == 0 {
		return "", attrs.Err()
	}
	return strconv.FormatUint(number, 10), attrs.Err()
}
