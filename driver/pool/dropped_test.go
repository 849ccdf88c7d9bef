package pool

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
)

// Random hosts lose allocated devices while the server's features change: the server would drop no
// published field, and every consumed counter exists.
func TestNothingDroppedIsPublished(t *testing.T) {
	for i, before := range pooltest.FeatureSets() {
		for j, after := range pooltest.FeatureSets() {
			random := rand.New(rand.NewPCG(uint64(i), uint64(j)))
			first := discoverytest.RandomHost(random, 30)
			in := Input{Node: "node", Features: after, Snapshot: discoverytest.RandomHost(random, 30), GoneEffect: resourceapi.DeviceTaintEffectNoSchedule}
			in.Last, _ = BuildPools(Input{Node: "node", Snapshot: first, Features: before})
			for _, name := range slices.Sorted(maps.Keys(devicesOf(in.Last))) {
				d, found := LookupDevice(first, name)
				if !found || random.IntN(3) > 0 {
					continue
				}
				h := hold(name, d.Silicon(), d.PartOf == nil, d.Takes)
				h.Results[0].Source, h.Results[0].Shared = d.Name, d.Shareable || d.Sharing != nil
				in.Claims = append(in.Claims, h)
			}
			published, _ := BuildPools(in)
			for _, device := range devicesOf(published) {
				for _, what := range dropped(device, countersOf(published), after) {
					t.Errorf("from %+v to %+v: %s has %s", before, after, device.Name, what)
				}
			}
		}
	}
}

// dropped names the fields of a device that the server drops or refuses.
func dropped(d resourceapi.Device, counters map[string]resourceapi.CounterSet, kept features.Set) (names []string) {
	policies := 0
	for _, capacity := range d.Capacity {
		if capacity.RequestPolicy != nil {
			policies++
		}
	}
	for name, there := range map[string]bool{
		"taints":           !kept.Taints && len(d.Taints) > 0,
		"sharing":          !kept.Sharing && d.AllowMultipleAllocations != nil,
		"request policies": !kept.Sharing && policies > 0,
		"lists":            !kept.Lists && len(withoutLists(d.Attributes)) < len(d.Attributes),
		"overhead":         !kept.Overhead && d.NodeAllocatableResources != nil,
		"counters":         !kept.Counters && len(d.ConsumesCounters) > 0,
	} {
		if there {
			names = append(names, name)
		}
	}
	for _, consumed := range d.ConsumesCounters {
		if !kept.Groups && len(consumed.CompatibilityGroups) > 0 {
			names = append(names, "groups")
		}
		for counter := range consumed.Counters {
			if _, found := counters[consumed.CounterSet].Counters[counter]; !found {
				names = append(names, fmt.Sprintf("counter %s/%s, which there is not", consumed.CounterSet, counter))
			}
		}
	}
	return names
}
