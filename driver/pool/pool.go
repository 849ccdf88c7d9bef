// Package pool turns the devices of a host into the ResourceSlices of its node's pool, and finds
// the device for an allocated name. The package is pure: it reads neither the host nor the API
// server.
package pool

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/internal/ledger/allocation"
)

// devicesPerSlice is the limit for slices with taints or counters. The limit applies to all slices,
// since otherwise the first taint would move devices between slices.
const devicesPerSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// Input is the complete input of [BuildPool].
type Input struct {
	Snapshot      *rules.Snapshot
	Withheld      map[string]string             // by physical device: why no new consumer can allocate it
	Claims        []*allocation.Claim           // of this boot
	Last          resourceslice.Pool            // the pool as last published
	Features      features.Set                  // of the API server
	ExcusedHealth map[string]bool               // devices whose Unknown health is not published
	GoneEffect    resourceapi.DeviceTaintEffect // for allocated devices missing from the snapshot
}

// BuildPool returns the pool, and a problem for each omitted device. BuildPool omits a device if
// the server would otherwise refuse other devices as well. The devices of a slice are ordered by
// their position in the machine and then by name, and counter sets by the name of the physical
// device.
// The same input always gives the same slices.
func BuildPool(given Input) (resourceslice.Pool, []discovery.Problem) {
	in := &input{
		Input: given, last: contentOf(given.Last), near: newNeighbourhood(rules.PlainDevices(given.Snapshot.Devices)),
		held: make(map[string]string), alone: make(map[string]allocation.Hold), owned: make(map[string][]owned), chosen: make(map[string][]allocation.Hold),
		moved: make(map[string]string),
	}
	for _, c := range given.Claims {
		for i := range c.Results {
			r := &c.Results[i]
			chosen := r.IsChosen()
			if !chosen {
				in.held[r.Device] = r.Source
			}
			h := r.Hold()
			if h.Open {
				continue
			}
			in.owned[r.Source] = append(in.owned[r.Source], owned{r.Device, h, c.Owner()})
			if moved := r.Edits.NetDevices; len(moved) == 1 {
				in.moved[r.Source] = moved[0].HostInterfaceName
			}
			switch {
			case chosen:
				in.chosen[r.Device] = append(in.chosen[r.Device], h)
			case h.Amount == nil:
				in.alone[r.Device] = h
			}
		}
	}
	in.joined = in.joinInterchangeable()
	in.joinGone()
	return in.buildPool()
}

// input is an Input with indexes.
type input struct {
	Input
	held  map[string]string          // allocated names to names in the snapshot, without common names
	alone map[string]allocation.Hold // exclusive allocations, by allocated name, without common names
	owned map[string][]owned         // allocations of devices without unlimited sharing, by name in the snapshot
	moved map[string]string          // network interfaces that claims move to pods, by name in the snapshot

	chosen map[string][]allocation.Hold // allocations by a common name, by that name
	joined map[string]*rules.Offered    // the first of the devices that are published as one, by their common name

	last content
	near *neighbourhood
}

// content is the content of a pool.
type content struct {
	devices  map[string]resourceapi.Device
	counters map[string]resourceapi.CounterSet
	places   map[string]int // by device name: position of the physical device, see [neighbourhood]; 0 if the device vanished
}

func (in *input) buildPool() (resourceslice.Pool, []discovery.Problem) {
	all, problems := in.poolContent()
	typed := in.relateDevices(all)
	in.shareLast(all)
	var pool resourceslice.Pool
	if in.Features.Separate || !in.Features.Counters { // without counters, slices need no combination
		pool.Slices = separateSlices(all, in.Last)
	} else {
		var left []discovery.Problem
		pool.Slices, left = in.combineSlices(all)
		problems = append(problems, left...)
	}
	for i := range pool.Slices {
		if typed && slices.ContainsFunc(pool.Slices[i].Devices, consumesCounters) {
			pool.Slices[i].PartitionTypeAttribute = new(partitionTypeName)
		}
	}
	if len(pool.Slices) == 0 {
		// An empty pool shows the presence of the driver.
		pool.Slices = []resourceslice.Slice{{}}
	}
	return pool, problems
}

// relateDevices sets the compatibility groups and partition types of competing devices, as far as
// the server keeps them, and reports whether the devices have partition types. All published
// devices are included, also allocated devices missing from the snapshot.
func (in *input) relateDevices(all content) (typed bool) {
	if in.Features.Groups {
		all.group()
	}
	return in.Features.PartitionType && all.setPartitionTypes()
}

// shareLast replaces devices by those of the last pool if they are equal. The library's caches still
// have the last pool's devices, and memory would hold both.
func (in *input) shareLast(all content) {
	for name, device := range all.devices {
		if last, known := in.last.devices[name]; known && equality.Semantic.DeepEqual(&last, &device) {
			all.devices[name] = last
		}
	}
}

// separateSlices returns the slices of the counter sets, followed by the slices of the devices.
func separateSlices(all content, last resourceslice.Pool) (out []resourceslice.Slice) {
	counters := slices.SortedFunc(maps.Values(all.counters), func(a, b resourceapi.CounterSet) int { return strings.Compare(a.Name, b.Name) })
	for chunk := range slices.Chunk(counters, resourceapi.ResourceSliceMaxCounterSets) {
		out = append(out, resourceslice.Slice{SharedCounters: chunk})
	}
	for _, chunk := range divideDevices(all.inOrder(), last) {
		out = append(out, resourceslice.Slice{Devices: chunk})
	}
	return out
}

// inOrder returns GPUs and NPUs before all other devices, both in topology order, and the devices of
// one physical device in name order. A scheduler without another preference allocates the first free
// devices of a slice (structured/internal/*/allocator_*.go of k8s.io/dynamic-resource-allocation, in
// 0.34 to 0.37), so a pod with several devices gets devices near each other. A vanished device
// follows its predecessor by name.
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

// poolContent returns the devices and counters of the pool.
func (in *input) poolContent() (content, []discovery.Problem) {
	out := content{make(map[string]resourceapi.Device), make(map[string]resourceapi.CounterSet), make(map[string]int)}
	var problems []discovery.Problem
	offered := in.chooseDevices()
	reshaped := in.reshapedClaims(offered)
	free := make(map[string][]string) // usable devices that are published as one, by their common name
	for _, d := range offered {
		if who := cmp.Or(reshaped[d.Name], reshaped[d.Silicon()]); who != "" {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: fmt.Errorf("%s has it, or a part of its silicon, in another form; it is left out until that ends", who)})
			continue
		}
		if err := checkCounters(&d); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
			continue
		}
		if in.joined[d.Interchangeable] != nil {
			if in.publishedHealth(&d).IsUsable() {
				free[d.Interchangeable] = append(free[d.Interchangeable], d.Name)
			}
			continue
		}
		if err := in.add(&out, &d); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
	}
	in.addInterchangeable(&out, free)
	in.addGone(&out)
	return out, problems
}

// chooseDevices returns the devices to publish.
//
// If the server lacks taints, devices in need of a taint are left out. The exception is a device
// allocated exclusively: no other claim can allocate it, and the scheduler must see its
// consumption. A device is also left out if a claim has a vanished partition of the same physical
// device and the counters do not show the partition.
//
// If the server lacks counters, the scheduler cannot see competition. Then chooseDevices returns
// only devices with room for each other: first the allocated devices, then usable ones, then the
// rest, each in name order.
func (in *input) chooseDevices() []rules.Offered {
	gone := in.takenByGone()
	offered := slices.DeleteFunc(slices.Clone(in.Snapshot.Devices), func(d rules.Offered) bool {
		_, taken := in.alone[d.Name]
		return in.Withheld[d.Silicon()] != "" || !taken && (!in.Features.Taints && !in.publishedHealth(&d).IsUsable() || in.isUncounted(&d, gone[d.Silicon()]))
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
		case in.publishedHealth(&d).IsUsable():
			return 1
		}
		return 2
	}
	slices.SortStableFunc(offered, func(a, b rules.Offered) int { return cmp.Compare(rank(a), rank(b)) })
	left := make(discovery.Budgets)
	return slices.DeleteFunc(offered, func(d rules.Offered) bool { return !takeOf(left, &d) })
}

// takeOf takes the counters of a device from its physical device, and reports whether enough was
// left.
func takeOf(left discovery.Budgets, d *rules.Offered) bool {
	if d.PartOf == nil || d.PartOf.Counters == nil {
		return true
	}
	budget := left.BudgetOf(&d.Device)
	if !budget.SufficesFor(d.Takes) {
		return false
	}
	budget.TakeAmounts(d.Takes)
	return true
}

// checkCounters returns an error for invalid counters. The server would refuse such a device, and
// the library's controller might refuse the whole pool.
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

// contentOf returns the content of a pool.
func contentOf(pool resourceslice.Pool) content {
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

// CompeteNewly reports whether a device consumes counters in after but not in before. If the server
// drops counters, the scheduler could allocate such devices together until the agent detects the
// drop.
func CompeteNewly(before, after resourceslice.Pool) bool {
	known := contentOf(before).devices
	for name, device := range contentOf(after).devices {
		if consumesCounters(device) && !consumesCounters(known[name]) {
			return true
		}
	}
	return false
}

func consumesCounters(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 }
