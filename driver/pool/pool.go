// Package pool turns the devices of a host into the ResourceSlices of its node's
// pool, and finds the device that an allocated name stands for. It is pure: it
// reads no host and asks no API server.
package pool

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/topology"
	"chandler.dev/driver/features"
	"chandler.dev/internal/ledger"
)

// devicesPerSlice is the limit where any device has a taint or takes of counters.
// It is kept to always, since the first taint would otherwise move devices between
// slices.
const devicesPerSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// Input is all that decides what is published.
type Input struct {
	Snapshot *rules.Snapshot
	Withheld map[string]string             // by silicon: why nobody new may have it
	Claims   []*ledger.Claim               // of this boot
	Last     resourceslice.Pool            // as it was last published
	Features features.Set                  // of the API server
	Excused  map[string]bool               // devices of which it is not said that they are Unknown
	Gone     resourceapi.DeviceTaintEffect // of devices that claims have and the snapshot has not
}

// Of returns the pool, and why devices are left out of it: those that could not be
// published without the server refusing their neighbours. Devices are in slices by
// where they are in the machine, and by their names, and counters by those of their
// silicon, so that the same input always makes the same slices.
func Of(given Input) (resourceslice.Pool, []discovery.Problem) {
	in := &input{
		Input: given, last: remember(given.Last),
		held: make(map[string]string), alone: make(map[string]ledger.Hold), owned: make(map[string][]owned),
	}
	for _, c := range given.Claims {
		for i := range c.Results {
			r := &c.Results[i]
			in.held[r.Device] = r.Source
			h := r.Hold()
			if h.Open {
				continue
			}
			in.owned[r.Source] = append(in.owned[r.Source], owned{r.Device, h, c.Owner()})
			if h.Amount == nil {
				in.alone[r.Device] = h
			}
		}
	}
	in.joinGone()
	return in.pool()
}

// input is an Input with what is looked up in it.
type input struct {
	Input
	held  map[string]string      // names of allocated devices to those in the snapshot
	alone map[string]ledger.Hold // what a claim has for itself, by the names of allocated devices
	owned map[string][]owned     // what claims have of devices that are not open, by the names in the snapshot
	last  content
}

// content is what a pool consists of.
type content struct {
	devices  map[string]resourceapi.Device
	counters map[string]resourceapi.CounterSet
	places   map[string]int // by name of a device: the place of its silicon among its neighbours, from 1; 0 of one that is gone
}

func (in *input) pool() (resourceslice.Pool, []discovery.Problem) {
	all, problems := in.content()
	typed := in.relate(all)
	var pool resourceslice.Pool
	if in.Features.Separate || !in.Features.Counters { // without counters there is nothing to put together
		pool.Slices = separate(all)
	} else {
		var left []discovery.Problem
		pool.Slices, left = in.combined(all)
		problems = append(problems, left...)
	}
	for i := range pool.Slices {
		if typed && slices.ContainsFunc(pool.Slices[i].Devices, consumes) {
			pool.Slices[i].PartitionTypeAttribute = new(partitionTypeName)
		}
	}
	if len(pool.Slices) == 0 {
		// An empty pool says that the driver is there.
		pool.Slices = []resourceslice.Slice{{}}
	}
	return pool, problems
}

// relate says how devices that compete stand to each other, as far as the server
// keeps it, and reports whether they have partition types. It is for all that is
// published, also what is gone and held.
func (in *input) relate(all content) (typed bool) {
	if in.Features.Groups {
		all.group()
	}
	return in.Features.PartitionType && all.classify()
}

// separate returns first the slices of the shared counters, then those of the
// devices.
func separate(all content) (out []resourceslice.Slice) {
	counters := slices.SortedFunc(maps.Values(all.counters), func(a, b resourceapi.CounterSet) int { return strings.Compare(a.Name, b.Name) })
	for chunk := range slices.Chunk(counters, resourceapi.ResourceSliceMaxCounterSets) {
		out = append(out, resourceslice.Slice{SharedCounters: chunk})
	}
	for chunk := range slices.Chunk(all.inOrder(), devicesPerSlice) {
		out = append(out, resourceslice.Slice{Devices: chunk})
	}
	return out
}

// inOrder returns the devices so that those of neighbours follow each other, and
// those of one piece of silicon in name order. A scheduler that has no reason to
// choose takes the first ones of a slice that are free
// (structured/internal/*/allocator_*.go of k8s.io/dynamic-resource-allocation, in
// 0.34 to 0.37), so that a pod with several gets neighbours. A device that is gone
// stays behind the one that is before it by name.
func (c content) inOrder() []resourceapi.Device {
	devices := slices.SortedFunc(maps.Values(c.devices), func(a, b resourceapi.Device) int { return strings.Compare(a.Name, b.Name) })
	places, last := make(map[string]int, len(devices)), 0
	for i := range devices {
		last = cmp.Or(c.places[devices[i].Name], last)
		places[devices[i].Name] = last
	}
	slices.SortStableFunc(devices, func(a, b resourceapi.Device) int { return cmp.Compare(places[a.Name], places[b.Name]) })
	return devices
}

// content returns the devices and counters of the pool.
func (in *input) content() (content, []discovery.Problem) {
	out := content{make(map[string]resourceapi.Device), make(map[string]resourceapi.CounterSet), make(map[string]int)}
	var problems []discovery.Problem
	chosen := in.choose()
	places := in.places()
	reshaped := in.reshaped(chosen)
	for _, d := range chosen {
		if who := cmp.Or(reshaped[d.Name], reshaped[d.Silicon()]); who != "" {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: fmt.Errorf("%s has it, or a part of its silicon, in another form; it is left out until that ends", who)})
			continue
		}
		if err := checkCounters(&d); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
			continue
		}
		if err := in.add(&out, &d, places[d.Silicon()]); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
	}
	in.addGone(&out)
	return out, problems
}

// places returns the place of each piece of silicon among its neighbours, from 1.
func (in *input) places() map[string]int {
	places := make(map[string]int)
	for i, silicon := range topology.Order(rules.Devices(in.Snapshot.Devices)) {
		places[silicon] = i + 1
	}
	return places
}

// choose returns the devices that are offered: without taints none that would
// have one, unless a claim has it for itself. Nobody else gets that, and the
// scheduler is to see what it takes. Nothing is offered of silicon of which a claim
// has a part that is gone, unless that is counted. Without counters the scheduler cannot know that devices compete: then
// those are offered that fit together, the held ones, after them what can be
// used, and of what is alike in this what comes first by name.
func (in *input) choose() []rules.Offered {
	gone := in.takenByGone()
	offered := slices.DeleteFunc(slices.Clone(in.Snapshot.Devices), func(d rules.Offered) bool {
		_, taken := in.alone[d.Name]
		return in.Withheld[d.Silicon()] != "" || !taken && (!in.Features.Taints && !in.health(&d).Usable() || in.uncounted(&d, gone[d.Silicon()]))
	})
	if in.Features.Counters {
		return offered
	}
	held := make(map[string]bool)
	for _, source := range in.held {
		held[source] = true
	}
	rank := func(d rules.Offered) int {
		switch {
		case held[d.Name]:
			return 0
		case in.health(&d).Usable():
			return 1
		}
		return 2
	}
	slices.SortStableFunc(offered, func(a, b rules.Offered) int { return cmp.Compare(rank(a), rank(b)) })
	left := make(map[string]map[string]resource.Quantity)
	return slices.DeleteFunc(offered, func(d rules.Offered) bool { return !takeOf(left, &d) })
}

// takeOf takes what the device takes of what is left of its silicon, and
// reports whether there was enough.
func takeOf(left map[string]map[string]resource.Quantity, d *rules.Offered) bool {
	if d.PartOf == nil || d.PartOf.Counters == nil {
		return true
	}
	if left[d.PartOf.Name] == nil {
		left[d.PartOf.Name] = maps.Clone(d.PartOf.Counters)
	}
	counters := left[d.PartOf.Name]
	for counter, quantity := range d.Takes {
		if have := counters[counter]; have.Cmp(quantity) < 0 {
			return false
		}
	}
	for counter, quantity := range d.Takes {
		rest := counters[counter].DeepCopy()
		rest.Sub(quantity)
		counters[counter] = rest
	}
	return true
}

// checkCounters reports what the server, or the helper for all of the pool,
// would refuse.
func checkCounters(d *rules.Offered) error {
	if d.PartOf == nil {
		return nil
	}
	if n := len(d.PartOf.Counters); n > resourceapi.ResourceSliceMaxCountersPerCounterSet {
		return fmt.Errorf("%s has %d counters, at most %d", d.PartOf.Name, n, resourceapi.ResourceSliceMaxCountersPerCounterSet)
	}
	if len(d.PartOf.Counters) == 0 {
		return nil
	}
	for _, message := range validation.IsDNS1123Label(d.PartOf.Name) {
		return fmt.Errorf("counter set %q: %s", d.PartOf.Name, message)
	}
	for counter := range d.Takes {
		if _, found := d.PartOf.Counters[counter]; !found {
			return fmt.Errorf("takes of counter %s, which %s does not have", counter, d.PartOf.Name)
		}
	}
	return nil
}

// remember returns what a pool consists of.
func remember(pool resourceslice.Pool) content {
	out := content{devices: make(map[string]resourceapi.Device), counters: make(map[string]resourceapi.CounterSet)}
	for _, slice := range pool.Slices {
		for _, device := range slice.Devices {
			out.devices[device.Name] = device
		}
		for _, set := range slice.SharedCounters {
			out.counters[set.Name] = set
		}
	}
	return out
}

// CompeteAnew reports whether there are devices that take of counters and did not
// before. A server that drops counters would let them be given out beside each
// other, until it is seen that it does.
func CompeteAnew(before, after resourceslice.Pool) bool {
	known := remember(before).devices
	for name, device := range remember(after).devices {
		if consumes(device) && !consumes(known[name]) {
			return true
		}
	}
	return false
}

func consumes(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 }
