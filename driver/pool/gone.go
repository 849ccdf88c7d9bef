package pool

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/ledger/allocation"
)

// takenOf returns the counters consumed by an allocation, and whether all contains them.
func takenOf(h allocation.Hold, all map[string]resource.Quantity) (map[string]resource.Quantity, bool) {
	if h.Whole {
		return all, len(all) > 0
	}
	for counter := range h.Takes {
		if _, found := all[counter]; !found {
			return nil, false
		}
	}
	return h.Takes, len(h.Takes) > 0
}

// counterConsumption returns an allocation's consumption of a counter set, or nil if the allocation
// has counters of another set.
func counterConsumption(h allocation.Hold, set resourceapi.CounterSet) []resourceapi.DeviceCounterConsumption {
	all := make(map[string]resource.Quantity, len(set.Counters))
	for name, counter := range set.Counters {
		all[name] = counter.Value
	}
	taken, counted := takenOf(h, all)
	if !counted {
		return nil
	}
	return []resourceapi.DeviceCounterConsumption{{CounterSet: set.Name, Counters: toCounters(taken)}}
}

// joinGone moves allocated devices missing from the snapshot into their present IOMMU groups. A
// claim may have recorded a device as alone before the device and others became one group. The
// configuration may leave such a device out, but a claim for another device of the group under vfio
// takes all functions of the group.
func (b *builder) joinGone() {
	groups := make(map[string]string) // name of the physical device, by the name of a function in its group
	for i := range b.Snapshot.Devices {
		d := &b.Snapshot.Devices[i]
		if d.PartOf == nil || d.Passthrough == nil {
			continue
		}
		for _, source := range d.Passthrough.Others {
			groups[discovery.DeviceName(sysfs.Device{Path: source})] = d.Silicon()
		}
	}
	for name, h := range b.alone {
		r := b.held[name]
		silicon, joined := groups[r.Source]
		if _, present := b.Snapshot.Lookup(r.Source); joined && !present && h.Silicon != silicon {
			h.Silicon, h.Whole, h.Takes = silicon, true, nil
			b.alone[name] = h
			b.recordPoolOf(silicon, r.Pool)
		}
	}
}

// takenByGone returns the allocations of devices missing from the snapshot, by physical device.
func (b *builder) takenByGone() map[string][]allocation.Hold {
	gone := make(map[string][]allocation.Hold)
	for name, h := range b.alone {
		if _, present := b.Snapshot.Lookup(b.held[name].Source); !present {
			gone[h.Silicon] = append(gone[h.Silicon], h)
		}
	}
	for _, holds := range b.chosen {
		for _, h := range holds {
			if _, present := b.Snapshot.Lookup(h.Device); !present {
				gone[h.Silicon] = append(gone[h.Silicon], h)
			}
		}
	}
	return gone
}

// isUncounted reports whether the scheduler cannot see the competition between a device and the
// allocated devices in gone.
func (b *builder) isUncounted(d *rules.Offered, gone []allocation.Hold) bool {
	return slices.ContainsFunc(gone, func(h allocation.Hold) bool {
		switch {
		case d.PartOf == nil:
			return true
		case !h.Whole && len(h.Takes) == 0:
			return false
		case !b.Features.Counters:
			return true
		}
		_, counted := takenOf(h, d.PartOf.Counters)
		return !counted
	})
}

// addGone adds allocated devices missing from the snapshot, in their last published form. A device
// without a known form has only a name. If the server lacks taints, addGone adds only
// exclusively allocated devices whose counters the scheduler must see. No other claim can allocate
// such a device.
func (b *builder) addGone() {
	for name, r := range b.held {
		if _, present := b.Snapshot.Lookup(r.Source); present || b.torn[name] || b.torn[r.Silicon] {
			continue
		}
		device, known := b.lastDevices[name]
		if !known {
			device = resourceapi.Device{Name: name}
		}
		device = withoutRelations(device)
		device.Taints = b.healthTaints(b.Snapshot.Gone.HealthOf(r.Source, b.GoneEffect))
		if !b.Features.Sharing {
			device.AllowMultipleAllocations, device.Capacity = nil, withoutPolicies(device.Capacity)
		}
		if !b.Features.Overhead {
			device.NodeAllocatableResources = nil
		}
		if !b.Features.Lists {
			device.Attributes = withoutLists(device.Attributes)
		}
		h, taken := b.alone[name]
		if set, found := b.counters[h.Silicon]; taken && found {
			device.ConsumesCounters = counterConsumption(h, set)
		}
		if !b.Features.Taints && (!consumesCounters(device) || !taken) {
			continue
		}
		if !b.keepCounters(device.ConsumesCounters) {
			device.ConsumesCounters = nil
		}
		b.devices[name], b.pools[name] = device, b.poolOfGone(r, device)
	}
}

// withoutPolicies returns the capacity without request policies, so that claims cannot request part
// of the capacity.
func withoutPolicies(capacity map[resourceapi.QualifiedName]resourceapi.DeviceCapacity) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	plain := maps.Clone(capacity)
	for name, one := range plain {
		one.RequestPolicy = nil
		plain[name] = one
	}
	return plain
}

// keepCounters adds the counter sets of a vanished device's consumption, and reports whether all of
// them still exist. The physical device may have been replaced by another.
func (b *builder) keepCounters(consumptions []resourceapi.DeviceCounterConsumption) bool {
	for _, consumed := range consumptions {
		set, found := b.counters[consumed.CounterSet]
		if !found {
			set, found = b.lastCounters[consumed.CounterSet]
		}
		if !found || !b.Features.Counters {
			return false
		}
		for counter := range consumed.Counters {
			if _, found := set.Counters[counter]; !found {
				return false
			}
		}
		b.counters[consumed.CounterSet] = set
	}
	return true
}
