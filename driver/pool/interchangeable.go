package pool

import (
	"reflect"

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
// The devices are published one by one if the server lacks sharing, or if the administrator has
// given reason to distinguish them: listed attributes with different values, different overhead, or
// sharing.
func (in *input) joinInterchangeable() map[string]*rules.Offered {
	first, apart := make(map[string]*rules.Offered), make(map[string]bool)
	for i := range in.Snapshot.Devices {
		d := &in.Snapshot.Devices[i]
		name := d.Interchangeable
		if name == "" {
			continue
		}
		if first[name] == nil {
			first[name] = d
		}
		apart[name] = apart[name] || !in.Features.Sharing || d.Sharing != nil || !in.isAlike(d, first[name])
	}
	for name := range first {
		if apart[name] {
			delete(first, name)
		}
	}
	return first
}

// isAlike reports whether the administrator has no reason to distinguish two interchangeable
// devices.
func (in *input) isAlike(d, first *rules.Offered) bool {
	for _, name := range in.Snapshot.Attributes {
		if !reflect.DeepEqual(d.Attributes[name], first.Attributes[name]) {
			return false
		}
	}
	return reflect.DeepEqual(d.Overhead, first.Overhead)
}

// addInterchangeable adds a device for each common name. Its capacity is the number of devices that
// are allocated by the common name, including devices that are withheld or gone, and of those that
// can be. free are the names of the latter. The scheduler subtracts the allocated ones.
//
// A claim requests several devices by an amount: the allocator does not allocate one device twice
// for a request with a count (allocateOne in k8s.io/dynamic-resource-allocation v0.37,
// structured/internal/*/allocator_*.go, continues after the device).
func (in *input) addInterchangeable(out *content, free map[string][]string) {
	for name, first := range in.joined {
		count := make(map[string]bool)
		for _, device := range free[name] {
			count[device] = true
		}
		for _, device := range in.chosen[name] {
			count[device] = true
		}
		if len(count) == 0 {
			continue
		}
		one, most := *resource.NewQuantity(1, resource.DecimalSI), *resource.NewQuantity(int64(min(len(count), MaxChosen)), resource.DecimalSI)
		amounts := &resourceapi.CapacityRequestPolicyRange{Min: &one, Max: &most, Step: &one}
		if one.Cmp(most) == 0 {
			amounts.Step = nil // the server refuses a step beyond the only amount
		}
		out.devices[name] = resourceapi.Device{
			Name: name, Attributes: in.publishedAttributes(first), AllowMultipleAllocations: new(true),
			NodeAllocatableResources: in.publishedOverhead(first),
			Capacity: discovery.Capacity{discovery.Shares: {
				Value:         *resource.NewQuantity(int64(len(count)), resource.DecimalSI),
				RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one, ValidRange: amounts},
			}},
		}
		out.places[name] = in.near.places[first.Silicon()]
	}
}
