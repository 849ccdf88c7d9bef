package pool

import (
	"maps"
	"reflect"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// MaxChosen is the highest number of interchangeable devices for one allocation. All devices of a
// request have the same environment variables, with the names of all of them, so the size of a
// claim's files grows with the square of the number.
const MaxChosen = resourceapi.AllocationResultsMaxSize

// joinInterchangeable returns the first device of each common name whose devices are published as
// one device. The allocator evaluates every free device until one matches, so thousands of equal
// devices would cost thousands of evaluations for each pod.
//
// The devices are published one by one if the server lacks sharing, or if claims may need to
// distinguish them: sharing, passthrough, different overhead, different values of published
// attributes, or an attribute of [discovery.DistinctAttributes] that the administrator lists. Devices
// with an extended resource as an attribute are published one by one too, because the attribute is
// for programs that find the devices of a claim by their ResourceSlice.
func (b *builder) joinInterchangeable() map[string]*rules.Offered {
	first, apart := make(map[string]*rules.Offered), make(map[string]bool)
	isUsable := func(d *rules.Offered) bool { return b.publishedHealth(d).IsUsable() }
	for i := range b.Snapshot.Devices {
		d := &b.Snapshot.Devices[i]
		if known := first[d.Interchangeable]; known == nil || !isUsable(known) && isUsable(d) {
			first[d.Interchangeable] = d
		}
	}
	delete(first, "")
	isNamed := func(offer discovery.Offer) bool { return offer.NameAs != "" }
	for i := range b.Snapshot.Devices {
		d := &b.Snapshot.Devices[i]
		known := first[d.Interchangeable]
		if known != nil && (!b.Features.Sharing || d.Sharing != nil || d.Passthrough != nil || slices.ContainsFunc(d.Offers, isNamed) || b.listsDistinct(d) || isUsable(d) && !b.isAlike(d, known)) {
			apart[d.Interchangeable] = true
		}
	}
	maps.DeleteFunc(first, func(name string, _ *rules.Offered) bool { return apart[name] })
	return first
}

// listsDistinct reports whether the administrator lists an attribute that distinguishes the device
// from interchangeable ones. The answer is the same while the device is in a container, where its
// network interface cannot be read.
func (b *builder) listsDistinct(d *rules.Offered) bool {
	isFunction := d.Attributes.String("resource.kubernetes.io/pciBusID") != ""
	return slices.ContainsFunc(discovery.DistinctAttributes, func(name resourceapi.QualifiedName) bool {
		_, has := d.Attributes[name]
		return b.isListed(name) && (has || isFunction)
	})
}

// isAlike reports whether two interchangeable devices have equal overhead and equal attributes, apart
// from those that ResourceSlices do not have for interchangeable devices.
func (b *builder) isAlike(d, other *rules.Offered) bool {
	names := slices.Concat(slices.Collect(maps.Keys(d.Attributes)), slices.Collect(maps.Keys(other.Attributes)))
	return reflect.DeepEqual(d.Overhead, other.Overhead) && !slices.ContainsFunc(names, func(name resourceapi.QualifiedName) bool {
		isPublished := !slices.Contains(discovery.OptionalAttributes, name) && !slices.Contains(discovery.DistinctAttributes, name)
		return (isPublished || b.isListed(name)) && (!reflect.DeepEqual(d.Attributes[name], other.Attributes[name]) || !reflect.DeepEqual(d.Lists[name], other.Lists[name]))
	})
}

// addInterchangeable adds a device for each common name. Its capacity is the number of devices that
// are allocated by the common name, including devices that are withheld or gone, and of those that
// can be. free are the names of the latter. The scheduler subtracts the allocated ones. Without any
// device that can be allocated, there is no device with the common name.
//
// A claim requests several devices by an amount: the allocator does not allocate one device twice
// for a request with a count (allocateOne in k8s.io/dynamic-resource-allocation v0.37,
// structured/internal/*/allocator_*.go, continues after the device).
func (b *builder) addInterchangeable(free map[string][]string) {
	for name, first := range b.joined {
		count := make(map[string]bool)
		for _, device := range free[name] {
			count[device] = true
		}
		for _, hold := range b.chosen[name] {
			count[hold.Device] = true
		}
		if len(free[name]) == 0 || b.torn[name] {
			continue
		}
		one, most := *resource.NewQuantity(1, resource.DecimalSI), *resource.NewQuantity(int64(min(len(count), MaxChosen)), resource.DecimalSI)
		amounts := &resourceapi.CapacityRequestPolicyRange{Min: &one, Max: &most, Step: &one}
		if one.Cmp(most) == 0 {
			amounts.Step = nil // the server refuses a step beyond the only amount
		}
		b.devices[name] = resourceapi.Device{
			Name: name, Attributes: b.publishedAttributes(first), AllowMultipleAllocations: new(true),
			NodeAllocatableResources: b.publishedOverhead(first),
			Capacity: discovery.Capacity{discovery.Shares: {
				Value:         *resource.NewQuantity(int64(len(count)), resource.DecimalSI),
				RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one, ValidRange: amounts},
			}},
		}
		b.places[name], b.pools[name] = b.near.places[first.Silicon()], b.poolOf(name, first.Silicon())
	}
}
