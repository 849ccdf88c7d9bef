package driver

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
)

const (
	// devicesPerSlice is the limit where any device has a taint or takes of
	// counters. It is kept to always, since the first taint would otherwise
	// move devices between slices.
	devicesPerSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

	// numberedShares is how often a shared device is published to a server
	// that does not know of sharing.
	numberedShares = 64

	// shareInfix stands between the name of a shared device and the number.
	shareInfix = "-share-"
)

// offer is all that decides what is published.
type offer struct {
	pool     string
	snapshot *discovery.Snapshot
	excused  map[string]bool               // devices of which it is not said that they are Unknown
	held     map[string]string             // names of allocated devices to those in the snapshot
	taken    map[string]holding            // what a claim has for itself, by the names of allocated devices
	gone     resourceapi.DeviceTaintEffect // of held devices that are not in the snapshot
	last     published                     // what was published before
	without  Without
}

// published is what a pool consists of.
type published struct {
	devices  map[string]resourceapi.Device
	counters map[string]resourceapi.CounterSet
}

// Slices returns what is published of a snapshot to an API server that drops
// what without says, as long as nothing is held: the pool of that name, and why
// devices are left out. Devices are in slices by their names and wholes by
// theirs, so that the same snapshot always makes the same slices.
func Slices(pool string, snapshot *discovery.Snapshot, without Without) (resourceslice.DriverResources, []discovery.Problem) {
	o := &offer{pool: pool, snapshot: snapshot, without: without}
	return o.driverResources()
}

// driverResources returns the slices of the pool. Devices that could not be
// published without the server refusing their neighbours are left out and named.
func (o *offer) driverResources() (resourceslice.DriverResources, []discovery.Problem) {
	all, problems := o.content()
	typed := o.relate(all)
	var pool resourceslice.Pool
	if o.without.Separate {
		var left []discovery.Problem
		pool.Slices, left = o.combined(all)
		problems = append(problems, left...)
	} else {
		pool.Slices = separate(all)
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
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{o.pool: pool}}, problems
}

// relate says how devices that compete stand to each other, as far as the server
// keeps it, and reports whether they have partition types. It is for all that is
// published, also what is gone and held.
func (o *offer) relate(all published) (typed bool) {
	if !o.without.Groups {
		all.group()
	}
	return !o.without.PartitionType && all.classify()
}

// separate returns first the slices of the shared counters, then those of the
// devices in name order.
func separate(all published) (out []resourceslice.Slice) {
	counters := slices.SortedFunc(maps.Values(all.counters), func(a, b resourceapi.CounterSet) int { return strings.Compare(a.Name, b.Name) })
	for chunk := range slices.Chunk(counters, resourceapi.ResourceSliceMaxCounterSets) {
		out = append(out, resourceslice.Slice{SharedCounters: chunk})
	}
	for chunk := range slices.Chunk(all.inOrder(), devicesPerSlice) {
		out = append(out, resourceslice.Slice{Devices: chunk})
	}
	return out
}

// inOrder returns the devices in name order.
func (p published) inOrder() []resourceapi.Device {
	return slices.SortedFunc(maps.Values(p.devices), func(a, b resourceapi.Device) int { return strings.Compare(a.Name, b.Name) })
}

// content returns the devices and counters of the pool.
func (o *offer) content() (published, []discovery.Problem) {
	out := published{make(map[string]resourceapi.Device), make(map[string]resourceapi.CounterSet)}
	var problems []discovery.Problem
	for _, d := range o.choose() {
		if err := checkCounters(&d); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
			continue
		}
		if err := o.add(&out, &d); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
	}
	o.addGone(&out)
	return out, problems
}

// choose returns the devices that are offered: without taints none that would
// have one, unless a claim has it for itself. Nobody else gets that, and the
// scheduler is to see what it takes. Nothing is offered of silicon of which a claim
// has a part that is gone, unless that is counted. Without counters the scheduler cannot know that devices compete: then
// those are offered that fit together, the held ones, after them what can be
// used, and of what is alike in this what comes first by name.
func (o *offer) choose() []discovery.Device {
	gone := o.takenByGone()
	offered := slices.DeleteFunc(slices.Clone(o.snapshot.Devices), func(d discovery.Device) bool {
		_, taken := o.taken[d.Name]
		return d.Withheld != "" || !taken && (o.without.Taints && !o.health(&d).Usable() || o.uncounted(&d, gone[d.Silicon()]))
	})
	if !o.without.Counters {
		return offered
	}
	held := make(map[string]bool)
	for _, source := range o.held {
		held[source] = true
	}
	rank := func(d discovery.Device) int {
		switch {
		case held[d.Name]:
			return 0
		case o.health(&d).Usable():
			return 1
		}
		return 2
	}
	slices.SortStableFunc(offered, func(a, b discovery.Device) int { return cmp.Compare(rank(a), rank(b)) })
	left := make(map[string]map[string]resource.Quantity)
	return slices.DeleteFunc(offered, func(d discovery.Device) bool { return !takeOf(left, &d) })
}

// takeOf takes what the device takes of what is left of its silicon, and
// reports whether there was enough.
func takeOf(left map[string]map[string]resource.Quantity, d *discovery.Device) bool {
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
func checkCounters(d *discovery.Device) error {
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

// add adds a device of the snapshot, under as many names as it has to have.
func (o *offer) add(out *published, d *discovery.Device) error {
	device := resourceapi.Device{Name: d.Name, Attributes: o.attributes(d), Capacity: d.Capacity, Taints: o.taints(o.health(d))}
	if !o.without.Overhead {
		device.NodeAllocatableResources = overhead(d.Overhead)
	}
	if d.PartOf != nil && len(d.PartOf.Counters) > 0 && len(d.Takes) > 0 && !o.without.Counters {
		set := d.PartOf.Name
		if err := addCounters(out, set, d.PartOf.Counters, d.Takes); err != nil {
			return err
		}
		device.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: counters(d.Takes)}}
	}
	numbered := sharesOf(d)
	switch {
	case !d.Shareable && d.Sharing == nil:
		out.devices[d.Name] = device
	case !o.without.Sharing:
		device.AllowMultipleAllocations = new(true)
		device.Capacity = consumable(d)
		out.devices[d.Name] = device
	case numbered == 0 || len(device.ConsumesCounters) > 0 || len(shareName(d.Name, numbered-1, numbered)) > validation.DNS1123LabelMaxLength:
		out.devices[d.Name] = device // for one claim: what would be counted twice is not shared, nor what has no room for a number
	default:
		for i := range numbered {
			device.Name = shareName(d.Name, i, numbered)
			out.devices[device.Name] = device
		}
	}
	return nil
}

// overhead returns what users of a device are charged with. The scheduler does
// so for each claim of it and each pod of the claim (pkg/scheduler/framework/
// plugins/dynamicresources/nodeallocatabledynamicresources.go), so that who has
// a share, numbered or not, is charged like who has all.
func overhead(needed discovery.HostResources) map[corev1.ResourceName]resourceapi.NodeAllocatableResource {
	if len(needed) == 0 {
		return nil
	}
	out := make(map[corev1.ResourceName]resourceapi.NodeAllocatableResource, len(needed))
	for name, amount := range needed {
		out[name] = resourceapi.NodeAllocatableResource{Overhead: &amount}
	}
	return out
}

// sharesOf returns as how many devices a shared one is published to a server
// that does not know of sharing, 0 if amounts of it are shared.
func sharesOf(d *discovery.Device) int {
	switch {
	case d.Shareable:
		return numberedShares
	case d.Sharing != nil && d.Sharing.Capacity == discovery.Shares:
		shares := d.Capacity[discovery.Shares].Value
		return int(shares.Value())
	}
	return 0
}

// consumable returns the capacity of a shared device with what a claim may take
// of it. Of a capacity without a policy the scheduler takes all for the first
// claim (k8s.io/dynamic-resource-allocation/structured/internal/…/
// consumable_capacity.go, fillEmptyRequest), so that nobody else got the device.
func consumable(d *discovery.Device) discovery.Capacity {
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
func addCounters(out *published, name string, all, taken map[string]resource.Quantity) error {
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

// shareName returns the name of one of the numbered shares of a device. Numbers
// have as many digits each, so that the order of names is theirs.
func shareName(device string, i, shares int) string {
	digits := max(2, len(strconv.Itoa(shares-1)))
	return fmt.Sprintf("%s%s%0*d", device, shareInfix, digits, i)
}

func counters(quantities map[string]resource.Quantity) map[string]resourceapi.Counter {
	out := make(map[string]resourceapi.Counter, len(quantities))
	for name, quantity := range quantities {
		out[name] = resourceapi.Counter{Value: quantity}
	}
	return out
}

// health returns what is said of a device's health.
func (o *offer) health(d *discovery.Device) discovery.Health {
	if d.Health.Status == discovery.Unknown && o.excused[d.Name] {
		return discovery.Health{Status: discovery.Healthy}
	}
	return d.Health
}

// taints returns what is said of a device that is not healthy. Its time is when
// the state began, the same after a restart; where that is not known, it is left
// to the server.
func (o *offer) taints(health discovery.Health) []resourceapi.DeviceTaint {
	key := health.Key()
	if key == "" || o.without.Taints || o.without.Told && health.Usable() {
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

// remember returns what the resources consist of.
func remember(resources resourceslice.DriverResources) published {
	out := published{make(map[string]resourceapi.Device), make(map[string]resourceapi.CounterSet)}
	for _, pool := range resources.Pools {
		for _, slice := range pool.Slices {
			for _, device := range slice.Devices {
				out.devices[device.Name] = device
			}
			for _, set := range slice.SharedCounters {
				out.counters[set.Name] = set
			}
		}
	}
	return out
}
