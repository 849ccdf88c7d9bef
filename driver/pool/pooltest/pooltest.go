package pooltest

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// Quantities returns quantities by name, from pairs such as "slices", 7.
func Quantities(pairs ...any) map[string]resource.Quantity {
	out := make(map[string]resource.Quantity)
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i].(string)] = *resource.NewQuantity(int64(pairs[i+1].(int)), resource.DecimalSI)
	}
	return out
}

// PartDevice is a device with some of the 7 slices of a physical device.
func PartDevice(silicon, name string, takes int) rules.Offered {
	return rules.Offered{Device: discovery.Device{Name: name, PartOf: &discovery.Silicon{Name: silicon, Counters: Quantities("slices", 7)}, Takes: Quantities("slices", takes)}}
}

// SketchPools returns a short form of the pools: a line for each slice, sorted by the name of the pool.
func SketchPools(pools resourceslice.DriverResources) []string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(pools.Pools)) {
		for i := range pools.Pools[name].Slices {
			lines = append(lines, sketchSlice(&pools.Pools[name].Slices[i]))
		}
	}
	return lines
}

func sketchSlice(slice *resourceslice.Slice) string {
	var words []string
	for _, set := range slice.SharedCounters {
		words = append(words, "set:"+set.Name)
	}
	for _, device := range slice.Devices {
		var word strings.Builder
		word.WriteString(device.Name)
		for _, taint := range device.Taints {
			fmt.Fprintf(&word, "!%s", strings.TrimPrefix(taint.Key, "chandler.dev/"))
			if taint.TimeAdded != nil {
				fmt.Fprintf(&word, "@%d", taint.TimeAdded.Unix())
			}
			fmt.Fprintf(&word, ":%s", taint.Effect)
		}
		for _, consumed := range device.ConsumesCounters {
			fmt.Fprintf(&word, "<%s", consumed.CounterSet)
		}
		if ptr.Deref(device.AllowMultipleAllocations, false) {
			word.WriteString("*")
		}
		words = append(words, word.String())
	}
	return strings.Join(words, " ")
}
