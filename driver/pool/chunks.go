package pool

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// divideDevices divides devices among slices, in their order. A device stays in the slice that it was
// last published in, and a new one joins the nearest device whose slice has room. So a device that
// comes or goes changes one slice, and the controller writes only that slice (syncPool in
// resourceslice/resourceslicecontroller.go of k8s.io/dynamic-resource-allocation, read in 0.37).
// Devices that fit into one slice do not depend on the last pool, so a publisher that starts with
// them need not read it.
func divideDevices(devices []resourceapi.Device, last resourceslice.Pool) [][]resourceapi.Device {
	fresh := spreadDevices(devices)
	if len(fresh) <= 1 {
		return fresh
	}
	indices, sizes := keepSlices(devices, last)
	for i := range devices {
		if indices[i] >= 0 {
			continue
		}
		if indices[i] = nearestSlice(indices, sizes, i); indices[i] < 0 {
			return fresh
		}
		sizes[indices[i]]++
	}
	chunks := make([][]resourceapi.Device, len(last.Slices))
	for i, index := range indices {
		chunks[index] = append(chunks[index], devices[i])
	}
	chunks = slices.DeleteFunc(chunks, func(chunk []resourceapi.Device) bool { return len(chunk) == 0 })
	isFull := func(chunk []resourceapi.Device) bool { return len(chunk) > devicesPerSlice }
	if len(chunks) > 2*len(fresh) || slices.ContainsFunc(chunks, isFull) {
		return fresh
	}
	return chunks
}

// keepSlices returns the index of the last slice of each device, -1 for new devices, and the number
// of devices for each slice.
func keepSlices(devices []resourceapi.Device, last resourceslice.Pool) (indices, sizes []int) {
	byName := make(map[string]int)
	for i, slice := range last.Slices {
		for _, device := range slice.Devices {
			byName[device.Name] = i
		}
	}
	indices, sizes = make([]int, len(devices)), make([]int, len(last.Slices))
	for i, device := range devices {
		index, known := byName[device.Name]
		if !known {
			indices[i] = -1
			continue
		}
		indices[i] = index
		sizes[index]++
	}
	return indices, sizes
}

// nearestSlice returns the slice with room that has the device nearest to the device at an index, or
// -1.
func nearestSlice(indices, sizes []int, at int) int {
	for distance := 1; distance < len(indices); distance++ {
		for _, i := range []int{at - distance, at + distance} {
			if i >= 0 && i < len(indices) && indices[i] >= 0 && sizes[indices[i]] < devicesPerSlice {
				return indices[i]
			}
		}
	}
	return -1
}

// spreadDevices divides devices evenly among slices, with room for an eighth more.
func spreadDevices(devices []resourceapi.Device) [][]resourceapi.Device {
	if len(devices) == 0 {
		return nil
	}
	count := (len(devices) + len(devices)/8 + devicesPerSlice - 1) / devicesPerSlice
	return slices.Collect(slices.Chunk(devices, (len(devices)+count-1)/count))
}
