package driver

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery/discoverytest"
)

// Whatever was published before, is held, and has gone since: to a server that
// has come to drop something that is not published, and what is taken is taken
// of counters that there are.
func TestNothingDroppedIsPublished(t *testing.T) {
	for i, before := range gates() {
		for j, after := range gates() {
			random := rand.New(rand.NewPCG(uint64(i), uint64(j)))
			first := discoverytest.RandomHost(random, 30)
			resources, _ := Slices("node", first, before)
			o := &offer{
				pool: "node", snapshot: discoverytest.RandomHost(random, 30), without: after, last: remember(resources),
				held: make(map[string]string), taken: make(map[string]holding), gone: resourceapi.DeviceTaintEffectNoSchedule,
			}
			for _, name := range slices.Sorted(maps.Keys(o.last.devices)) {
				d, found := (&view{snapshot: first}).allocated(name)
				if !found || random.IntN(3) > 0 {
					continue
				}
				o.held[name] = d.Name
				if !d.Shareable && d.Sharing == nil {
					o.taken[name] = holding{d.Silicon(), d.PartOf == nil, d.Takes}
				}
			}
			published, _ := o.driverResources()
			out := remember(published)
			for _, device := range out.devices {
				for _, what := range dropped(device, out, after) {
					t.Errorf("from %+v to %+v: %s has %s", before, after, device.Name, what)
				}
			}
		}
	}
}

// dropped names what a device has that the server drops or refuses.
func dropped(d resourceapi.Device, all published, without Without) (names []string) {
	policies := 0
	for _, capacity := range d.Capacity {
		if capacity.RequestPolicy != nil {
			policies++
		}
	}
	for name, there := range map[string]bool{
		"taints":           without.Taints && len(d.Taints) > 0,
		"sharing":          without.Sharing && d.AllowMultipleAllocations != nil,
		"request policies": without.Sharing && policies > 0,
		"lists":            without.Lists && len(withoutLists(d.Attributes)) < len(d.Attributes),
		"overhead":         without.Overhead && d.NodeAllocatableResources != nil,
		"counters":         without.Counters && len(d.ConsumesCounters) > 0,
	} {
		if there {
			names = append(names, name)
		}
	}
	for _, consumed := range d.ConsumesCounters {
		if without.Groups && len(consumed.CompatibilityGroups) > 0 {
			names = append(names, "groups")
		}
		for counter := range consumed.Counters {
			if _, found := all.counters[consumed.CounterSet].Counters[counter]; !found {
				names = append(names, fmt.Sprintf("counter %s/%s, which there is not", consumed.CounterSet, counter))
			}
		}
	}
	return names
}
