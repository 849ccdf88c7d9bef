package topology

import (
	"cmp"
	"slices"
	"strings"

	"chandler.dev/discovery"
)

// NearestAdapter is the attribute with the name of the network adapter nearest to an accelerator.
// The adapter and its virtual functions have the same value.
const NearestAdapter = "nearestAdapter"

// NearestAdapters returns the network adapter nearest to each accelerator, by the accelerator's
// name. If several adapters are equally near, each accelerator gets another adapter as far as
// possible. If some adapters have RDMA, the others are ignored. The result also contains the chosen adapters and their virtual functions, with the name
// of the adapter. An accelerator that shares not even a NUMA node with an adapter has none.
func NearestAdapters(devices []discovery.Device) map[string]string {
	var accelerators, adapters []*discovery.Device
	for i := range devices {
		switch d := &devices[i]; {
		case isAccelerator(d):
			accelerators = append(accelerators, d)
		case isAdapter(d):
			adapters = append(adapters, d)
		}
	}
	if slices.ContainsFunc(adapters, hasRDMA) {
		adapters = slices.DeleteFunc(adapters, func(d *discovery.Device) bool { return !hasRDMA(d) })
	}
	byName := func(a, b *discovery.Device) int { return strings.Compare(a.Name, b.Name) }
	slices.SortFunc(accelerators, byName)
	slices.SortFunc(adapters, byName)
	places := make([]*Place, len(adapters))
	for i, a := range adapters {
		places[i] = PlaceOf(a)
	}
	nearest, uses := make(map[string]string), make(map[string]int)
	for _, d := range accelerators {
		place, best, most := PlaceOf(d), "", 0
		for i, a := range adapters {
			near := Nearness(place, places[i])
			if c := cmp.Or(cmp.Compare(near, most), cmp.Compare(uses[best], uses[a.Name])); near > 0 && c > 0 {
				best, most = a.Name, near
			}
		}
		if best != "" {
			nearest[d.Name], nearest[best] = best, best
			uses[best]++
		}
	}
	for i := range devices {
		d := &devices[i]
		if parent := d.Attributes.String("parent"); parent != "" && d.Attributes.String("kind") == "nic" && nearest[parent] != "" {
			nearest[d.Name] = nearest[parent]
		}
	}
	return nearest
}

// isAdapter reports whether a device is a network adapter, and not a virtual function.
func isAdapter(d *discovery.Device) bool {
	return d.Attributes.String("kind") == "nic" && d.Attributes.String("parent") == ""
}

func hasRDMA(d *discovery.Device) bool { return len(d.Names("rdmaDevice")) > 0 }
