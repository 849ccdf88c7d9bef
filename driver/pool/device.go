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

// add adds a device of the snapshot, under as many names as it has to have.
func (in *input) add(out *content, d *rules.Offered, place int) error {
	device := resourceapi.Device{Name: d.Name, Attributes: in.attributes(d), Capacity: d.Capacity, Taints: in.taints(in.health(d))}
	if in.Features.Overhead {
		device.NodeAllocatableResources = overhead(d.Overhead)
	}
	if d.PartOf != nil && len(d.PartOf.Counters) > 0 && len(d.Takes) > 0 && in.Features.Counters {
		set := d.PartOf.Name
		if err := addCounters(out, set, d.PartOf.Counters, d.Takes); err != nil {
			return err
		}
		device.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: counters(d.Takes)}}
	}
	names, shared := in.names(d)
	if shared {
		device.AllowMultipleAllocations = new(true)
		device.Capacity = consumable(d)
	}
	for _, name := range names {
		device.Name = name
		out.devices[name], out.places[name] = device, place
	}
	return nil
}

// names returns the names by which a device is published, and whether several
// claims may have it by its one name. To a server that does not know of sharing, a
// device is for one claim if it would be counted twice, or if there is no room for a
// number in its name.
func (in *input) names(d *rules.Offered) (names []string, shared bool) {
	numbered := sharesOf(d)
	counted := d.PartOf != nil && len(d.PartOf.Counters) > 0 && len(d.Takes) > 0 && in.Features.Counters
	switch {
	case !d.Open && d.Sharing == nil:
	case in.Features.Sharing:
		return []string{d.Name}, true
	case numbered > 0 && !counted && len(rules.ShareName(d.Name, numbered-1, numbered)) <= validation.DNS1123LabelMaxLength:
		for i := range numbered {
			names = append(names, rules.ShareName(d.Name, i, numbered))
		}
		return names, false
	}
	return []string{d.Name}, false
}

// overhead returns what users of a device are charged with. The scheduler does
// so for each claim of it and each pod of the claim (pkg/scheduler/framework/
// plugins/dynamicresources/nodeallocatabledynamicresources.go), so that who has
// a share, numbered or not, is charged like who has all.
func overhead(needed rules.HostResources) map[corev1.ResourceName]resourceapi.NodeAllocatableResource {
	if len(needed) == 0 {
		return nil
	}
	out := make(map[corev1.ResourceName]resourceapi.NodeAllocatableResource, len(needed))
	for name, amount := range needed {
		out[name] = resourceapi.NodeAllocatableResource{Overhead: &amount}
	}
	return out
}

// consumable returns the capacity of a shared device with what a claim may take
// of it. Of a capacity without a policy the scheduler takes all for the first
// claim (k8s.io/dynamic-resource-allocation/structured/internal/…/
// consumable_capacity.go, fillEmptyRequest), so that nobody else got the device.
func consumable(d *rules.Offered) discovery.Capacity {
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
				units.Step = nil // beyond the only unit, which the server refuses
			}
			policy = &resourceapi.CapacityRequestPolicy{Default: new(s.Default.DeepCopy()), ValidRange: units}
		}
		one.RequestPolicy = policy
		capacity[name] = one
	}
	return capacity
}

// addCounters adds the counter set of a piece of silicon, once.
func addCounters(out *content, name string, all, taken map[string]resource.Quantity) error {
	set, found := out.counters[name]
	if !found {
		out.counters[name] = resourceapi.CounterSet{Name: name, Counters: counters(all)}
		return nil
	}
	for counter := range taken {
		if _, found := set.Counters[counter]; !found {
			return fmt.Errorf("takes of counter %s, which %s does not have by its other devices", counter, name)
		}
	}
	return nil
}

func counters(quantities map[string]resource.Quantity) map[string]resourceapi.Counter {
	out := make(map[string]resourceapi.Counter, len(quantities))
	for name, quantity := range quantities {
		out[name] = resourceapi.Counter{Value: quantity}
	}
	return out
}

// health returns what is said of a device's health.
func (in *input) health(d *rules.Offered) discovery.Health {
	if d.Health.Status == discovery.Unknown && in.Excused[d.Name] {
		return discovery.Health{Status: discovery.Healthy}
	}
	return d.Health
}

// taints returns what is said of a device that is not healthy. Its time is when
// the state began, the same after a restart; where that is not known, it is left
// to the server.
func (in *input) taints(health discovery.Health) []resourceapi.DeviceTaint {
	key := health.Key()
	if key == "" || !in.Features.Taints || !in.Features.Told && health.Usable() {
		return nil
	}
	taint := resourceapi.DeviceTaint{Key: taintKey(key), Effect: health.Effect}
	if taint.Effect == "" {
		taint.Effect = resourceapi.DeviceTaintEffectNoSchedule
	}
	if !health.Since.IsZero() {
		taint.TimeAdded = &health.Since
	}
	return []resourceapi.DeviceTaint{taint}
}

func taintKey(condition discovery.Condition) string {
	return discovery.Domain + "/" + string(condition)
}
