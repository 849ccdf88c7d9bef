package driver

import (
	"fmt"
	"math/rand/v2"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
)

// gates are combinations of what an API server may drop: with all alpha fields,
// and with none of them.
func gates() (all []Without) {
	for i := range 8 {
		without := Without{Taints: i&1 > 0, Counters: i&2 > 0, Sharing: i&4 > 0}
		if !without.Taints {
			all = append(all, without)
		}
		without.Overhead, without.Groups, without.PartitionType, without.Lists = true, true, true, true
		all = append(all, without)
	}
	return all
}

// cluster is what a scheduler knows of one node.
type scheduler struct {
	t        *testing.T
	features structured.Features
	slices   []*resourceapi.ResourceSlice
	claims   map[types.UID]*resourceapi.ResourceClaim // that are allocated
	cache    *cel.Cache
}

// schedulerOf returns a scheduler for a snapshot, as it is published to a server.
func schedulerOf(t *testing.T, snapshot *discovery.Snapshot, without Without) *scheduler {
	t.Helper()
	resources, problems := Slices("node", snapshot, without)
	if len(problems) > 0 {
		t.Fatalf("problems: %v", problems)
	}
	c := newScheduler(t, without)
	pool := resources.Pools["node"]
	for i, slice := range pool.Slices {
		c.slices = append(c.slices, &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("slice-", i)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: discovery.Domain, NodeName: new("node"), Devices: slice.Devices, SharedCounters: slice.SharedCounters, PartitionTypeAttribute: slice.PartitionTypeAttribute,
				Pool: resourceapi.ResourcePool{Name: "node", Generation: 1, ResourceSliceCount: int64(len(pool.Slices))},
			},
		})
	}
	return c
}

// newScheduler returns a scheduler without slices, with the gates of a server.
func newScheduler(t *testing.T, without Without) *scheduler {
	return &scheduler{
		t: t, claims: make(map[types.UID]*resourceapi.ResourceClaim), cache: cel.NewCache(100, cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: !without.Lists}),
		features: structured.Features{
			AdminAccess: true, PrioritizedList: true,
			DeviceTaints: !without.Taints, PartitionableDevices: !without.Counters, ConsumableCapacity: !without.Sharing,
			CompatibilityGroups: !without.Counters && !without.Groups, ListTypeAttributes: !without.Lists,
		},
	}
}

// Get returns a class for all devices. With List it is a DeviceClassLister.
func (c *scheduler) Get(name string) (*resourceapi.DeviceClass, error) {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}, nil
}

// List returns no class: none has an extended resource.
func (c *scheduler) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

// allocate allocates a claim for one device, and reports whether it could.
func (c *scheduler) allocate(uid types.UID, request resourceapi.ExactDeviceRequest) (*resourceapi.ResourceClaim, bool) {
	c.t.Helper()
	request.DeviceClassName, request.AllocationMode, request.Count = "any", resourceapi.DeviceAllocationModeExactCount, 1
	return c.allocateClaim(uid, resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "r", Exactly: &request}}}})
}

// allocateClaim allocates a claim, and reports whether it could.
func (c *scheduler) allocateClaim(uid types.UID, spec resourceapi.ResourceClaimSpec) (*resourceapi.ResourceClaim, bool) {
	c.t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: string(uid), UID: uid}, Spec: spec}
	allocator, err := structured.NewAllocator(c.t.Context(), c.features, c.state(), c, c.slices, c.cache)
	if err != nil {
		c.t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
	results, err := allocator.Allocate(c.t.Context(), node, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		c.t.Fatal(err)
	}
	if len(results) == 0 {
		return nil, false
	}
	claim.Status.Allocation = &results[0]
	c.claims[uid] = claim
	return claim, true
}

// state is what is allocated.
func (c *scheduler) state() structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range c.claims {
		for _, r := range claim.Status.Allocation.Devices.Results {
			if isAdmin(&r) {
				continue
			}
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			if r.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
	}
	return state
}

// overlaps says what two of the allocated claims have both, "" if nothing is. It
// goes by the devices of the host, and by nothing that was published.
func (c *scheduler) overlaps(view *view) string {
	holders := make(map[string]types.UID)
	consumed := make(map[string]map[resourceapi.QualifiedName]resource.Quantity)
	taken := make(map[string]map[string]resource.Quantity)
	alone := make(map[string]string) // silicon that a device has which takes of no counter
	for uid, claim := range c.claims {
		for _, r := range claim.Status.Allocation.Devices.Results {
			d, found := view.allocated(r.Device)
			if !found {
				return fmt.Sprintf("%s is no device", r.Device)
			}
			if d.Shareable || isAdmin(&r) {
				continue
			}
			amount := consumedBy(&r, &d)
			if other, held := holders[d.Name]; held && (amount == nil || consumed[d.Name] == nil) {
				return fmt.Sprintf("%s is held by %s and %s", d.Name, uid, other)
			} else if !held {
				holders[d.Name] = uid
				if total := addTo(taken, d.Silicon(), d.Takes); d.PartOf != nil && exceeds(total, d.PartOf.Counters) {
					return fmt.Sprintf("of %s is taken %v", d.Silicon(), total)
				}
				if other := alone[d.Silicon()]; other != "" {
					return fmt.Sprintf("%s has %s and %s", uid, d.Name, other)
				}
				if d.PartOf == nil {
					alone[d.Silicon()] = d.Name
				}
			}
			if amount != nil {
				limits := make(map[resourceapi.QualifiedName]resource.Quantity)
				for name, capacity := range d.Capacity {
					limits[name] = capacity.Value
				}
				if total := addTo(consumed, d.Name, amount); exceeds(total, limits) {
					return fmt.Sprintf("of %s is consumed %v", d.Name, total)
				}
			}
		}
	}
	return ""
}

func isAdmin(r *resourceapi.DeviceRequestAllocationResult) bool {
	return r.AdminAccess != nil && *r.AdminAccess
}

// consumedBy returns what a claim consumes of a shared device, nil if it has it
// alone.
func consumedBy(r *resourceapi.DeviceRequestAllocationResult, d *discovery.Device) map[resourceapi.QualifiedName]resource.Quantity {
	if d.Sharing == nil {
		return nil
	}
	if r.Device != d.Name {
		return map[resourceapi.QualifiedName]resource.Quantity{discovery.Shares: resource.MustParse("1")}
	}
	return r.ConsumedCapacity
}

func addTo[K comparable](totals map[string]map[K]resource.Quantity, name string, more map[K]resource.Quantity) map[K]resource.Quantity {
	if totals[name] == nil {
		totals[name] = make(map[K]resource.Quantity)
	}
	for key, quantity := range more {
		total := totals[name][key].DeepCopy()
		total.Add(quantity)
		totals[name][key] = total
	}
	return totals[name]
}

func exceeds[K comparable](totals, limits map[K]resource.Quantity) bool {
	for key, total := range totals {
		limit := limits[key]
		if total.Cmp(limit) > 0 {
			return true
		}
	}
	return false
}

// Whatever the host, the claims and what the API server drops: the scheduler
// never gives the same hardware to two claims, nor any that nobody is to have,
// and the driver takes whatever it gives.
func TestSchedulerAndDriverAgree(t *testing.T) {
	recorded := recordedHosts(t)
	sizes := []int{1, 7, 20, 65, 200}
	if !testing.Short() {
		sizes = append(sizes, 1024)
	}
	for _, size := range sizes {
		for i, without := range gates() {
			t.Run(fmt.Sprintf("%d devices, %+v", size, without), func(t *testing.T) {
				t.Parallel()
				random := rand.New(rand.NewPCG(uint64(size), uint64(i)))
				agree(t, random, discoverytest.RandomHost(random, size, recorded...), without, min(3*size, 60))
			})
		}
	}
}

func agree(t *testing.T, random *rand.Rand, snapshot *discovery.Snapshot, without Without, steps int) {
	b := newBench(t).restart().offers(snapshot.Devices...)
	v := b.view.Load()
	s := schedulerOf(t, v.snapshot, without)
	c := &claimer{Rand: random, devices: v.snapshot.Devices, without: without}
	for _, slice := range s.slices {
		c.published += len(slice.Spec.Devices)
	}
	for step := range steps {
		if old := s.claims[c.someClaim(s.claims)]; old != nil && c.oneIn(4) {
			if err := b.tryUnprepare(old); err != nil {
				t.Fatal(err)
			}
			delete(s.claims, old.UID)
		}
		claim, allocated := s.allocateClaim(types.UID(fmt.Sprint("claim-", step)), c.spec())
		if !allocated {
			continue
		}
		if overlap := s.overlaps(v); overlap != "" {
			t.Fatalf("after %d claims: %s", len(s.claims), overlap)
		}
		if device := forbidden(claim, v); device != "" {
			t.Fatalf("after %d claims: %s", len(s.claims), device)
		}
		if _, err := b.try(claim); err != nil {
			t.Fatalf("the driver refuses what the scheduler gave: %v", err)
		}
	}
}

// Every device that nobody is to be kept from can be had, and every unhealthy one
// by who tolerates that; without counters something of every piece of silicon.
func TestNoDeviceIsUnreachable(t *testing.T) {
	recorded := recordedHosts(t)
	for i, without := range gates() {
		t.Run(fmt.Sprintf("%+v", without), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(7, uint64(i)))
			snapshot := newBench(t).restart().offers(discoverytest.RandomHost(random, 70, recorded...).Devices...).view.Load().snapshot
			s := schedulerOf(t, snapshot, without)
			reached := make(map[string]bool)
			wanted := make(map[string]bool)
			for _, d := range snapshot.Devices {
				request := resourceapi.ExactDeviceRequest{Selectors: bySerial(d.Name)}
				switch {
				case d.Withheld != "" || !d.Health.Usable() && without.Taints:
					continue
				case !d.Health.Usable():
					request.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
				}
				wanted[d.Silicon()] = true
				if _, found := s.allocate("claim", request); found {
					reached[d.Silicon()] = true
					delete(s.claims, "claim")
				} else if !without.Counters {
					t.Errorf("%s cannot be had", d.Name)
				}
			}
			for silicon := range wanted {
				if !reached[silicon] {
					t.Errorf("nothing of %s can be had", silicon)
				}
			}
		})
	}
}

func bySerial(name string) []resourceapi.DeviceSelector {
	return []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.attributes[%q].serial == %q", discovery.Domain, name),
	}}}
}
