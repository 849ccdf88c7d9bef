// Package pool turns the devices of a host into the ResourceSlices of its node's pools, and finds
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

// Input is the complete input of [BuildPools].
type Input struct {
	Node          string // name of the node
	Snapshot      *rules.Snapshot
	Withheld      map[string]string             // by physical device: why no new consumer can allocate it
	Claims        []*allocation.Claim           // of this boot
	Last          resourceslice.DriverResources // the pools as last published
	Features      features.Set                  // of the API server
	ExcusedHealth map[string]bool               // devices whose Unknown health is not published
	Returning     map[string]bool               // devices whose network interface may soon return from the pod of an ended claim
	GoneEffect    resourceapi.DeviceTaintEffect // for allocated devices missing from the snapshot
}

// BuildPools returns the pools of a node by name, and a problem for each omitted device; see
// [discovery.PoolName]. BuildPools omits a device if the server would otherwise refuse other devices
// as well. A pool without devices is omitted, except that a node without devices has an empty main
// pool, which shows the presence of the driver. The devices of a slice are ordered by their position
// in the machine and then by name, and counter sets by the name of the physical device. The same
// input always gives the same slices.
func BuildPools(given Input) (resourceslice.DriverResources, []discovery.Problem) {
	b := newBuilder(given)
	b.addDevices()
	if b.Features.Groups {
		b.setGroups()
	}
	typed := b.Features.PartitionType && b.setPartitionTypes()
	b.shareLast()
	devicesByPool := b.devicesByPool()
	pools := make(map[string]resourceslice.Pool)
	for _, name := range slices.Sorted(maps.Keys(devicesByPool)) {
		devices := devicesByPool[name]
		var pool resourceslice.Pool
		if b.Features.Separate || !b.Features.Counters { // without counters, slices need no combination
			pool.Slices = b.separateSlices(name, devices)
		} else {
			pool.Slices = b.combineSlices(devices)
		}
		for i := range pool.Slices {
			if typed && slices.ContainsFunc(pool.Slices[i].Devices, consumesCounters) {
				pool.Slices[i].PartitionTypeAttribute = new(partitionTypeName)
			}
		}
		pools[name] = pool
	}
	if len(pools) == 0 {
		pools[discovery.PoolName(b.Node, true)] = resourceslice.Pool{Slices: []resourceslice.Slice{{}}}
	}
	return resourceslice.DriverResources{Pools: pools}, b.problems
}

// builder builds the content of the pools: devices, and the counter sets that they consume.
type builder struct {
	Input

	devices  map[string]resourceapi.Device
	counters map[string]resourceapi.CounterSet
	places   map[string]int    // by device name: position of the physical device, see [deviceOrder]; 0 if the device vanished
	pools    map[string]string // by device name: name of the pool
	problems []discovery.Problem

	held   map[string]*allocation.Result // by allocated name, without common names; open allocations only if there is no other
	alone  map[string]allocation.Hold    // exclusive allocations, by allocated name, without common names
	owned  map[string][]owned            // allocations of devices without unlimited sharing, by name in the snapshot
	chosen map[string][]allocation.Hold  // allocations by a common name, by that name
	moved  map[string]string             // network interfaces that claims move to pods, by name in the snapshot

	recorded map[string]string // pools that claims name for their devices, see recordPool
	torn     map[string]bool   // names that claims have by both pools

	joined map[string]*rules.Offered // the first of the devices that are published as one, by their common name
	near   *deviceOrder

	// The content of the pools as last published.
	lastDevices  map[string]resourceapi.Device
	lastCounters map[string]resourceapi.CounterSet
}

// newBuilder returns a builder without devices.
func newBuilder(given Input) *builder {
	b := &builder{
		Input:   given,
		devices: make(map[string]resourceapi.Device), counters: make(map[string]resourceapi.CounterSet), places: make(map[string]int), pools: make(map[string]string),
		recorded: make(map[string]string), torn: make(map[string]bool),
		held: make(map[string]*allocation.Result), alone: make(map[string]allocation.Hold), owned: make(map[string][]owned),
		chosen: make(map[string][]allocation.Hold), moved: make(map[string]string),
		near:        newDeviceOrder(rules.PlainDevices(given.Snapshot.Devices)),
		lastDevices: devicesOf(given.Last), lastCounters: countersOf(given.Last),
	}
	for _, c := range given.Claims {
		for i := range c.Results {
			b.addAllocation(&c.Results[i], c.Owner())
		}
	}
	b.joined = b.joinInterchangeable()
	b.joinGone()
	return b
}

// addAllocation adds an allocation to the indexes.
func (b *builder) addAllocation(r *allocation.Result, owner allocation.Owner) {
	chosen, h := r.IsChosen(), r.Hold()
	if !chosen && (b.held[r.Device] == nil || !h.Open) {
		b.held[r.Device] = r
	}
	if h.Open {
		return
	}
	b.recordPool(r)
	b.owned[r.Source] = append(b.owned[r.Source], owned{r.Device, h, owner})
	if moved := r.Edits.NetDevices; len(moved) == 1 {
		b.moved[r.Source] = moved[0].HostInterfaceName
	}
	switch {
	case chosen:
		b.chosen[r.Device] = append(b.chosen[r.Device], h)
	case h.Amount == nil:
		b.alone[r.Device] = h
	}
}

// shareLast replaces devices by those of the last pools if they are equal. The library's caches still
// have the last pools' devices, and memory would hold both.
func (b *builder) shareLast() {
	for name, device := range b.devices {
		if last, known := b.lastDevices[name]; known && equality.Semantic.DeepEqual(&last, &device) {
			b.devices[name] = last
		}
	}
}

// separateSlices returns the slices of a pool with the devices: the slices of the counter sets,
// followed by the slices of the devices.
func (b *builder) separateSlices(pool string, devices []resourceapi.Device) (out []resourceslice.Slice) {
	counters := slices.SortedFunc(maps.Values(b.counters), func(x, y resourceapi.CounterSet) int { return strings.Compare(x.Name, y.Name) })
	counters = slices.DeleteFunc(counters, func(set resourceapi.CounterSet) bool { return b.poolOf(set.Name) != pool })
	for chunk := range slices.Chunk(counters, resourceapi.ResourceSliceMaxCounterSets) {
		out = append(out, resourceslice.Slice{SharedCounters: chunk})
	}
	for _, chunk := range divideDevices(devices, b.Last.Pools[pool]) {
		out = append(out, resourceslice.Slice{Devices: chunk})
	}
	return out
}

// devicesByPool returns the devices of each pool that has devices, in order.
func (b *builder) devicesByPool() map[string][]resourceapi.Device {
	byPool := make(map[string][]resourceapi.Device)
	for _, device := range b.devicesInOrder() {
		pool := b.pools[device.Name]
		byPool[pool] = append(byPool[pool], device)
	}
	return byPool
}

// devicesInOrder returns all devices in topology order, and the devices of one physical device in
// name order. A scheduler without another preference allocates the first free devices of a slice
// (structured/internal/*/allocator_*.go of k8s.io/dynamic-resource-allocation, in 0.34 to 0.37), so
// a pod with several devices gets devices near each other. A vanished device follows its
// predecessor by name.
func (b *builder) devicesInOrder() []resourceapi.Device {
	devices := slices.SortedFunc(maps.Values(b.devices), func(x, y resourceapi.Device) int { return strings.Compare(x.Name, y.Name) })
	places, last := make(map[string]int, len(devices)), 0
	for i := range devices {
		last = cmp.Or(b.places[devices[i].Name], last)
		places[devices[i].Name] = last
	}
	slices.SortStableFunc(devices, func(x, y resourceapi.Device) int { return cmp.Compare(places[x.Name], places[y.Name]) })
	return devices
}

// addDevices adds the devices of the pool and their counter sets.
func (b *builder) addDevices() {
	offered := b.chooseDevices()
	reshaped := b.reshapedDevices(offered)
	free := make(map[string][]string) // usable devices that are published as one, by their common name
	for i := range offered {
		d := &offered[i]
		err := cmp.Or(reshaped[d.Name], reshaped[d.Silicon()], b.checkPool(d), checkCounters(d))
		switch {
		case err != nil:
		case b.joined[d.Interchangeable] == nil:
			err = b.addDevice(d)
		case b.publishedHealth(d).IsUsable():
			free[d.Interchangeable] = append(free[d.Interchangeable], d.Name)
		}
		if err != nil {
			b.problems = append(b.problems, discovery.Problem{Device: d.Name, Err: err})
		}
	}
	b.addInterchangeable(free)
	b.addGone()
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
func (b *builder) chooseDevices() []rules.Offered {
	gone := b.takenByGone()
	offered := slices.DeleteFunc(slices.Clone(b.Snapshot.Devices), func(d rules.Offered) bool {
		_, taken := b.alone[d.Name]
		return b.Withheld[d.Silicon()] != "" || !taken && (!b.Features.Taints && !b.publishedHealth(&d).IsUsable() || b.isUncounted(&d, gone[d.Silicon()]))
	})
	if b.Features.Counters {
		return offered
	}
	held := make(map[string]bool)
	for _, r := range b.held {
		held[r.Source] = true
	}
	rank := func(d rules.Offered) int {
		switch {
		case held[d.Name]:
			return 0
		case b.publishedHealth(&d).IsUsable():
			return 1
		}
		return 2
	}
	slices.SortStableFunc(offered, func(x, y rules.Offered) int { return cmp.Compare(rank(x), rank(y)) })
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

// SlicesOf returns the slices of all pools, sorted by the name of the pool.
func SlicesOf(pools resourceslice.DriverResources) (all []resourceslice.Slice) {
	for _, name := range slices.Sorted(maps.Keys(pools.Pools)) {
		all = append(all, pools.Pools[name].Slices...)
	}
	return all
}

// devicesOf returns the devices of all pools, by name.
func devicesOf(pools resourceslice.DriverResources) map[string]resourceapi.Device {
	devices := make(map[string]resourceapi.Device)
	for _, slice := range SlicesOf(pools) {
		for _, device := range slice.Devices {
			devices[device.Name] = device
		}
	}
	return devices
}

// countersOf returns the counter sets of all pools, by name.
func countersOf(pools resourceslice.DriverResources) map[string]resourceapi.CounterSet {
	counters := make(map[string]resourceapi.CounterSet)
	for _, slice := range SlicesOf(pools) {
		for _, set := range slice.SharedCounters {
			counters[set.Name] = set
		}
	}
	return counters
}

// CompeteNewly reports whether a device consumes counters in after but not in before. If the server
// drops counters, the scheduler could allocate such devices together until the agent detects the
// drop.
func CompeteNewly(before, after resourceslice.DriverResources) bool {
	known := devicesOf(before)
	for name, device := range devicesOf(after) {
		if consumesCounters(device) && !consumesCounters(known[name]) {
			return true
		}
	}
	return false
}

func consumesCounters(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 }
