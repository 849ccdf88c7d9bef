package pool

import (
	"cmp"
	"errors"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
)

// The limits of a slice before Kubernetes 1.35, which the API package no longer defines
// (ResourceSliceMaxSharedCounters and ResourceSliceMaxDeviceCountersPerSlice in
// pkg/apis/resource/types.go of 1.34). Before 1.35, taints and counters do not lower the maximum
// number of devices.
const (
	combinedDevices  = resourceapi.ResourceSliceMaxDevices
	combinedCounters = 32   // in all counter sets of a slice
	combinedTaken    = 1024 // counters consumed by all devices of a slice
)

// combineSlices returns the slices of a pool with the devices, each counter set next to all its
// consumers. Kubernetes 1.34 requires this layout, since its scheduler counts within a slice
// (structured/internal/incubating/allocator_incubating.go of 0.34, checkAvailableCounters). The
// slices are ordered by their first devices. Devices of a counter set too large for a slice are
// left out, with a problem for each.
func (b *builder) combineSlices(devices []resourceapi.Device) (out []resourceslice.Slice) {
	for _, unit := range b.smallestSlices(devices) {
		b.fitUnit(&unit)
		if last := len(out) - 1; last >= 0 && fitsLimits(join(out[last], unit)) {
			out[last] = join(out[last], unit)
			continue
		}
		out = append(out, unit)
	}
	return out
}

// smallestSlices returns the smallest possible slices: each counter set with all its consumers, and
// each other device alone.
func (b *builder) smallestSlices(devices []resourceapi.Device) (units []resourceslice.Slice) {
	of := make(map[string]int) // index in units, by counter set
	for _, device := range devices {
		if len(device.ConsumesCounters) == 0 {
			units = append(units, resourceslice.Slice{Devices: []resourceapi.Device{device}})
			continue
		}
		set := device.ConsumesCounters[0].CounterSet // no device consumes from two sets
		i, found := of[set]
		if !found {
			i, of[set] = len(units), len(units)
			units = append(units, resourceslice.Slice{SharedCounters: []resourceapi.CounterSet{b.counters[set]}})
		}
		units[i].Devices = append(units[i].Devices, device)
	}
	return units
}

func join(a, b resourceslice.Slice) resourceslice.Slice {
	return resourceslice.Slice{
		SharedCounters: slices.Concat(a.SharedCounters, b.SharedCounters),
		Devices:        slices.Concat(a.Devices, b.Devices),
	}
}

// fitsLimits reports whether a slice is within the limits.
func fitsLimits(slice resourceslice.Slice) bool {
	counters, taken := 0, 0
	for _, set := range slice.SharedCounters {
		counters += len(set.Counters)
	}
	for _, device := range slice.Devices {
		for _, consumed := range device.ConsumesCounters {
			taken += len(consumed.Counters)
		}
	}
	return len(slice.Devices) <= combinedDevices && counters <= combinedCounters && taken <= combinedTaken
}

var errNoRoom = errors.New("the API server wants all devices that compete in one slice, which has no room for so many")

// fitUnit removes devices from a unit too large for a slice. The last devices are removed first,
// and allocated devices after all others, because the scheduler must see how much the allocated
// devices consume.
func (b *builder) fitUnit(unit *resourceslice.Slice) {
	if fitsLimits(*unit) {
		return
	}
	free := func(d resourceapi.Device) int {
		if _, held := b.held[d.Name]; held {
			return 0
		}
		return 1
	}
	devices := slices.Clone(unit.Devices)
	slices.SortStableFunc(devices, func(x, y resourceapi.Device) int { return cmp.Compare(free(x), free(y)) })
	for unit.Devices = devices; len(unit.Devices) > 0 && !fitsLimits(*unit); unit.Devices = unit.Devices[:len(unit.Devices)-1] {
		b.problems = append(b.problems, discovery.Problem{Device: unit.Devices[len(unit.Devices)-1].Name, Err: errNoRoom})
	}
	slices.SortFunc(unit.Devices, func(x, y resourceapi.Device) int { return strings.Compare(x.Name, y.Name) })
}
