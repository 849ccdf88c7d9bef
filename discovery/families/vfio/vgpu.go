package vfio

import (
	"strconv"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// manager is NVIDIA's driver. For virtual functions that were made vGPUs it is
// their vfio driver. Other functions it drives for computing.
const manager = "nvidia"

// vgpuType is the attribute of a virtual function under NVIDIA's driver that has
// the number of its vGPU type, 0 while it is none (NVIDIA's documentation of the
// vGPU software, "vendor-specific VFIO framework"; before, vGPUs were mediated).
const vgpuType = "nvidia/current_vgpu_type"

// withoutOthers returns the functions without those that are under NVIDIA's driver
// and are no vGPUs.
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

// vgpuOf returns the number of the vGPU type that a virtual function is of, "" if
// it is none.
func vgpuOf(function sysfs.Device) (string, error) {
	if function.Driver() != manager || !function.Exists("physfn") {
		return "", nil
	}
	attrs := function.Attrs()
	number, _ := attrs.Uint(vgpuType)
	if number == 0 {
		return "", attrs.Err()
	}
	return strconv.FormatUint(number, 10), attrs.Err()
}
