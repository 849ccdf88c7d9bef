package pool

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// addDevice adds a device of the snapshot, under each of its published names.
func (b *builder) addDevice(d *rules.Offered) error {
	device := resourceapi.Device{Name: d.Name, Attributes: b.publishedAttributes(d), Capacity: d.Capacity, Taints: b.healthTaints(b.publishedHealth(d))}
	device.NodeAllocatableResources = b.publishedOverhead(d)
	if d.PartOf != nil && len(d.PartOf.Counters) > 0 && len(d.Takes) > 0 && b.Features.Counters {
		set := d.PartOf.Name
		if err := b.addCounters(set, d.PartOf.Counters, d.Takes); err != nil {
			return err
		}
		device.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: toCounters(d.Takes)}}
	}
	names, shared := b.names(d)
	if shared {
		device.AllowMultipleAllocations = new(true)
		device.Capacity = consumableCapacity(d)
	}
	for _, name := range names {
		device.Name = name
		b.devices[name], b.places[name], b.pools[name] = device, b.near.places[d.Silicon()], b.poolOf(d.Silicon())
	}
	return nil
}

// names returns the published names of a device, and whether several claims can allocate the device
// under its single name. The name of an interchangeable device is the common name. If the server
// lacks sharing, numbered shares replace the single name.
// There are two exceptions, in which the device is published once, for one claim: a device with
// counters, which would otherwise be consumed once for each share, and a device whose name has no
// room for a number.
func (b *builder) names(d *rules.Offered) (names []string, shared bool) {
	numbered := sharesOf(d)
	counted := d.PartOf != nil && len(d.PartOf.Counters) > 0 && len(d.Takes) > 0 && b.Features.Counters
	switch {
	case b.joined[d.Interchangeable] != nil:
		return []string{d.Interchangeable}, false
	case !d.Shareable && d.Sharing == nil:
	case b.Features.Sharing:
		return []string{d.Name}, true
	case numbered > 0 && !counted && len(rules.ShareName(d.Name, numbered-1, numbered)) <= validation.DNS1123LabelMaxLength:
		for i := range numbered {
			names = append(names, rules.ShareName(d.Name, i, numbered))
		}
		return names, false
	}
	return []string{d.Name}, false
}

// publishedOverhead returns the node resources charged for an allocation of the device, if the
// server keeps them. The scheduler
// charges them for each claim on the device and each pod of the claim
// (pkg/scheduler/framework/plugins/ dynamicresources/nodeallocatabledynamicresources.go). A share,
// numbered or not, therefore costs as much as the whole device.
func (b *builder) publishedOverhead(d *rules.Offered) map[corev1.ResourceName]resourceapi.NodeAllocatableResource {
	if len(d.Overhead) == 0 || !b.Features.Overhead {
		return nil
	}
	out := make(map[corev1.ResourceName]resourceapi.NodeAllocatableResource, len(d.Overhead))
	for name, amount := range d.Overhead {
		out[name] = resourceapi.NodeAllocatableResource{Overhead: &amount}
	}
	return out
}

// consumableCapacity returns the capacity of a shared device with the request policy of each entry.
// For a capacity without a policy the scheduler gives everything to the first claim
// (fillEmptyRequest in
// k8s.io/dynamic-resource-allocation/structured/internal/…/consumable_capacity.go), and no second
// claim could allocate the device.
func consumableCapacity(d *rules.Offered) discovery.Capacity {
	capacity := make(discovery.Capacity, len(d.Capacity))
	for name, one := range d.Capacity {
		zero := resource.NewQuantity(0, one.Value.Format)
		policy := &resourceapi.CapacityRequestPolicy{
			Default:    zero,
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: zero, Max: new(one.Value.DeepCopy())},
		}
		if s := d.Sharing; s != nil && s.Capacity == name {
			most := s.Unit.DeepCopy()
			most.Mul(one.Value.Value() / s.Unit.Value())
			units := &resourceapi.CapacityRequestPolicyRange{Min: &s.Unit, Max: &most, Step: &s.Unit}
			if s.Unit.Cmp(most) == 0 {
				units.Step = nil // the server refuses a step beyond the only unit
			}
			policy = &resourceapi.CapacityRequestPolicy{Default: new(s.Default.DeepCopy()), ValidRange: units}
		}
		one.RequestPolicy = policy
		capacity[name] = one
	}
	return capacity
}

// addCounters adds the counter set of a physical device. If the set exists already, addCounters
// returns an error for a consumed counter missing from the set.
func (b *builder) addCounters(name string, all, taken map[string]resource.Quantity) error {
	set, found := b.counters[name]
	if !found {
		b.counters[name] = resourceapi.CounterSet{Name: name, Counters: toCounters(all)}
		return nil
	}
	for counter := range taken {
		if _, found := set.Counters[counter]; !found {
			return fmt.Errorf("takes of counter %s, which %s does not have by its other devices", counter, name)
		}
	}
	return nil
}

func toCounters(quantities map[string]resource.Quantity) map[string]resourceapi.Counter {
	out := make(map[string]resourceapi.Counter, len(quantities))
	for name, quantity := range quantities {
		out[name] = resourceapi.Counter{Value: quantity}
	}
	return out
}

// publishedHealth returns the health to publish for a device. An excused device with unknown health
// is published as healthy.
func (b *builder) publishedHealth(d *rules.Offered) discovery.Health {
	if d.Health.Status == discovery.Unknown && b.ExcusedHealth[d.Name] {
		return discovery.Health{Status: discovery.Healthy}
	}
	return d.Health
}

// healthTaints returns the taints for a health. A healthy device has none, and neither has a usable
// device unless the server keeps taints without an effect. TimeAdded is the start of the state,
// which is the same after a restart of the agent. If the start is unknown, the server sets the
// time.
func (b *builder) healthTaints(health discovery.Health) []resourceapi.DeviceTaint {
	key := health.Key()
	if key == "" || !b.Features.Taints || !b.Features.NoEffectTaints && health.IsUsable() {
		return nil
	}
	taint := resourceapi.DeviceTaint{Key: discovery.Domain + "/" + string(key), Effect: health.Effect}
	if taint.Effect == "" {
		taint.Effect = resourceapi.DeviceTaintEffectNoSchedule
	}
	if !health.Since.IsZero() {
		taint.TimeAdded = &health.Since
	}
	return []resourceapi.DeviceTaint{taint}
}
