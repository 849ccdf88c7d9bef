package driver

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
)

// holding is what an allocated device has of its silicon: all, what it takes of
// the counters, or a part that takes of none and competes with the whole alone.
type holding struct {
	silicon string
	whole   bool
	takes   map[string]resource.Quantity
}

// of returns what is held of counters, and whether it is of these.
func (h holding) of(all map[string]resource.Quantity) (map[string]resource.Quantity, bool) {
	if h.whole {
		return all, len(all) > 0
	}
	for counter := range h.takes {
		if _, found := all[counter]; !found {
			return nil, false
		}
	}
	return h.takes, len(h.takes) > 0
}

// consumption returns what is taken of a counter set, nil if it is of another.
func (h holding) consumption(set resourceapi.CounterSet) []resourceapi.DeviceCounterConsumption {
	all := make(map[string]resource.Quantity, len(set.Counters))
	for name, counter := range set.Counters {
		all[name] = counter.Value
	}
	taken, counted := h.of(all)
	if !counted {
		return nil
	}
	return []resourceapi.DeviceCounterConsumption{{CounterSet: set.Name, Counters: counters(taken)}}
}

// takenByGone returns what claims have that is not in the snapshot, by silicon.
func (o *offer) takenByGone() map[string][]holding {
	gone := make(map[string][]holding)
	for name, h := range o.taken {
		if _, present := o.snapshot.Lookup(o.held[name]); !present {
			gone[h.silicon] = append(gone[h.silicon], h)
		}
	}
	return gone
}

// uncounted reports whether the scheduler cannot see that the device competes
// with others that are gone.
func (o *offer) uncounted(d *discovery.Device, gone []holding) bool {
	return slices.ContainsFunc(gone, func(h holding) bool {
		switch {
		case d.PartOf == nil:
			return true
		case !h.whole && len(h.takes) == 0:
			return false
		case o.without.Counters:
			return true
		}
		_, counted := h.of(d.PartOf.Counters)
		return !counted
	})
}

// addGone adds devices that are gone but held, as they were last published. Of
// one that this process has not published there is only the name. Without taints
// only those are added of which the scheduler is to see what they take, and which
// nobody else gets.
func (o *offer) addGone(out *published) {
	for name, source := range o.held {
		if _, present := o.snapshot.Lookup(source); present {
			continue
		}
		device, known := o.last.devices[name]
		if !known {
			device = resourceapi.Device{Name: name}
		}
		device = unrelated(device)
		device.Taints = o.taints(o.snapshot.HealthOfGone(source, o.gone))
		if o.without.Sharing {
			device.AllowMultipleAllocations, device.Capacity = nil, withoutPolicies(device.Capacity)
		}
		if o.without.Overhead {
			device.NodeAllocatableResources = nil
		}
		if o.without.Lists {
			device.Attributes = withoutLists(device.Attributes)
		}
		h, taken := o.taken[name]
		if set, found := out.counters[h.silicon]; taken && found {
			device.ConsumesCounters = h.consumption(set)
		}
		if o.without.Taints && (!consumes(device) || !taken) {
			continue
		}
		if !o.keepCounters(out, device.ConsumesCounters) {
			device.ConsumesCounters = nil
		}
		out.devices[name] = device
	}
}

// withoutPolicies returns capacity of which nobody takes a part.
func withoutPolicies(capacity map[resourceapi.QualifiedName]resourceapi.DeviceCapacity) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	plain := maps.Clone(capacity)
	for name, one := range plain {
		one.RequestPolicy = nil
		plain[name] = one
	}
	return plain
}

// keepCounters adds what a device that is gone takes of, and reports whether
// all of it is still there: the silicon may have been replaced by another.
func (o *offer) keepCounters(out *published, consumptions []resourceapi.DeviceCounterConsumption) bool {
	for _, consumed := range consumptions {
		set, found := out.counters[consumed.CounterSet]
		if !found {
			set, found = o.last.counters[consumed.CounterSet]
		}
		if !found || o.without.Counters {
			return false
		}
		for counter := range consumed.Counters {
			if _, found := set.Counters[counter]; !found {
				return false
			}
		}
		out.counters[consumed.CounterSet] = set
	}
	return true
}
