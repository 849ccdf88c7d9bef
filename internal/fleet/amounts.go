package fleet

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"chandler.dev/discovery"
)

// Amounts are quantities by name.
type Amounts map[string]resource.Quantity

// add adds a quantity.
func (a Amounts) add(name string, quantity resource.Quantity) {
	sum := a[name].DeepCopy()
	sum.Add(quantity)
	a[name] = sum
}

// IsOpen reports whether any number of claims can have the device at once. By default, a claim
// consumes none of such a device's capacity.
func IsOpen(d *resourceapi.Device) bool {
	if !ptr.Deref(d.AllowMultipleAllocations, false) {
		return false
	}
	for _, capacity := range d.Capacity {
		if capacity.RequestPolicy == nil || capacity.RequestPolicy.Default == nil || !capacity.RequestPolicy.Default.IsZero() {
			return false
		}
	}
	return true
}

// addConsumption adds a claim's consumption of a shared device's capacity.
func (f *Fleet) addConsumption(id ID, result *resourceapi.DeviceRequestAllocationResult) {
	if ptr.Deref(result.AdminAccess, false) {
		return
	}
	if f.consumed[id] == nil {
		f.consumed[id] = make(Amounts)
	}
	for name, quantity := range result.ConsumedCapacity {
		f.consumed[id].add(string(name), quantity)
	}
}

// RoomFor reports whether a claim can have the requested capacity of a device in addition to the
// present consumption. Without a request for a capacity, the claim consumes the default of the
// device's policy, or everything (structured/internal/*/consumable_capacity.go of
// k8s.io/dynamic-resource-allocation 0.37, fillEmptyRequest).
func (a Amounts) RoomFor(d *resourceapi.Device, asked map[resourceapi.QualifiedName]resource.Quantity) bool {
	for name, capacity := range d.Capacity {
		takes, requested := asked[name]
		switch policy := capacity.RequestPolicy; {
		case requested:
		case policy != nil && policy.Default != nil:
			takes = *policy.Default
		default:
			takes = capacity.Value
		}
		sum := a[string(name)].DeepCopy()
		sum.Add(takes)
		if sum.Cmp(capacity.Value) > 0 {
			return false
		}
	}
	return true
}

// countersLeft returns the rest of the counters of all pools, by pool and counter set.
func (f *Fleet) countersLeft() map[ID]discovery.Budgets {
	left := make(map[ID]discovery.Budgets)
	for _, slice := range current(f.Slices, "") {
		pool := poolOf(slice)
		for _, set := range slice.Spec.SharedCounters {
			if left[pool] == nil {
				left[pool] = make(discovery.Budgets)
			}
			left[pool][set.Name] = discovery.NewBudget(amountsOf(set.Counters))
		}
	}
	for i := range f.Devices {
		d := &f.Devices[i]
		if len(d.BlockingHolders()) == 0 {
			continue // several claims for one shared device consume its counters once
		}
		for _, consumption := range d.Spec.ConsumesCounters {
			left[ID{Driver: d.Driver, Pool: d.Pool}][consumption.CounterSet].TakeAmounts(amountsOf(consumption.Counters))
		}
	}
	return left
}

// amountsOf returns the values of counters.
func amountsOf(counters map[string]resourceapi.Counter) map[string]resource.Quantity {
	amounts := make(map[string]resource.Quantity, len(counters))
	for name, counter := range counters {
		amounts[name] = counter.Value
	}
	return amounts
}

// sufficesFor reports whether enough is left of the counters that the device consumes.
func sufficesFor(left discovery.Budgets, d *resourceapi.Device) bool {
	return !slices.ContainsFunc(d.ConsumesCounters, func(consumption resourceapi.DeviceCounterConsumption) bool {
		return !left[consumption.CounterSet].SufficesFor(amountsOf(consumption.Counters))
	})
}
