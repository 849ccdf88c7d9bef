package driver

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
)

// overlaps returns a text about hardware shared by two of the allocated claims, or "". It compares
// the devices of the host and ignores the published slices.
func overlaps(claims map[types.UID]*resourceapi.ResourceClaim, view *view) string {
	holders := make(map[string]types.UID)
	consumed := make(map[string]map[resourceapi.QualifiedName]resource.Quantity)
	taken := make(map[string]map[string]resource.Quantity)
	alone := make(map[string]string) // allocated device without counters, by physical device
	for uid, claim := range claims {
		for _, r := range claim.Status.Allocation.Devices.Results {
			d, found := view.Device(r.Device)
			if !found {
				return fmt.Sprintf("%s is no device", r.Device)
			}
			if d.Shareable || pooltest.IsAdmin(&r) {
				continue
			}
			amount := consumedBy(&r, &d)
			if other, held := holders[d.Name]; held && (amount == nil || consumed[d.Name] == nil) {
				return fmt.Sprintf("%s is in use by %s and %s", d.Name, uid, other)
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

// consumedBy returns how much a claim consumes of a shared device, or nil if the claim has the
// whole device.
func consumedBy(r *resourceapi.DeviceRequestAllocationResult, d *rules.Offered) map[resourceapi.QualifiedName]resource.Quantity {
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

// On every host, for all claims and whatever the API server drops, the scheduler never allocates
// hardware to two claims and never allocates withheld devices. The driver accepts every allocation.
func TestSchedulerAndDriverAgree(t *testing.T) {
	recorded := recordedHosts(t)
	sizes := []int{1, 7, 20, 65}
	if !discoverytest.IsBrief() {
		sizes = append(sizes, 200, 1024)
	}
	for _, size := range sizes {
		for i, kept := range pooltest.FeatureSets() {
			t.Run(fmt.Sprintf("%d devices, %+v", size, kept), func(t *testing.T) {
				t.Parallel()
				random := rand.New(rand.NewPCG(uint64(size), uint64(i)))
				host := discoverytest.RandomHost(random, size, recorded...)
				// Prepare waits for the driver of a function that has none.
				synctest.Test(t, func(t *testing.T) { agree(t, random, host, kept, min(3*size, 60)) })
			})
		}
	}
}

// schedulerOf returns a scheduler with the slices of a view, as published to a server with the
// given features.
func schedulerOf(t *testing.T, v *view, kept features.Set) *pooltest.Scheduler {
	t.Helper()
	published, problems := pool.BuildPools(pool.Input{Node: "node", Snapshot: v.snapshot, Withheld: v.withheld, Features: kept})
	if len(problems) > 0 {
		t.Fatalf("problems: %v", problems)
	}
	return pooltest.NewScheduler(t, kept).Publish(published)
}

// withOwnNodes returns the devices of a snapshot with unique device nodes. A random host combines
// devices of several hosts, whose nodes have the same paths.
func withOwnNodes(snapshot *rules.Snapshot) (devices []rules.Offered) {
	for _, d := range snapshot.Devices {
		var nodes []*specs.DeviceNode
		for i, n := range d.Edits.DeviceNodes {
			nodes = append(nodes, &specs.DeviceNode{Path: n.Path, HostPath: fmt.Sprintf("/dev/%s/%d", d.Name, i), Type: "c"})
		}
		d.Edits.DeviceNodes = nodes
		devices = append(devices, d)
	}
	return devices
}

// someWithheld withholds some physical devices of a snapshot.
func someWithheld(random *rand.Rand, snapshot *rules.Snapshot) map[string]string {
	withheld := make(map[string]string)
	for i := range snapshot.Devices {
		if random.IntN(25) == 0 {
			withheld[snapshot.Devices[i].Silicon()] = "moves to the device-plugin API"
		}
	}
	return withheld
}

func agree(t *testing.T, random *rand.Rand, snapshot *rules.Snapshot, kept features.Set, steps int) {
	b := newBench(t).restart().offers(withOwnNodes(snapshot)...)
	b.Publish(b.view.Load().snapshot, someWithheld(random, snapshot))
	v := b.view.Load()
	s := schedulerOf(t, v, kept)
	c := &claimer{Rand: random, devices: v.snapshot.Devices, kept: kept}
	for _, slice := range s.Slices {
		c.published += len(slice.Spec.Devices)
	}
	for step := range steps {
		if old := s.Claims[c.someClaim(s.Claims)]; old != nil && c.oneIn(4) {
			if err := b.tryUnprepare(old); err != nil {
				t.Fatal(err)
			}
			delete(s.Claims, old.UID)
		}
		claim, allocated := s.AllocateClaim(types.UID(fmt.Sprint("claim-", step)), c.spec())
		if !allocated {
			continue
		}
		if overlap := overlaps(s.Claims, v); overlap != "" {
			t.Fatalf("after %d claims: %s", len(s.Claims), overlap)
		}
		if device := forbidden(claim, v); device != "" {
			t.Fatalf("after %d claims: %s", len(s.Claims), device)
		}
		if _, err := b.try(claim); err != nil && !hasNoDriver(claim, v) {
			t.Fatalf("the driver refuses what the scheduler gave: %v", err)
		}
	}
}

// hasNoDriver reports whether a claim has a function without a driver, which cannot be used.
func hasNoDriver(claim *resourceapi.ResourceClaim, v *view) bool {
	return slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		d, found := v.Device(r.Device)
		return found && requireDriver(&d) != nil
	})
}

// Every device that is not withheld can be allocated. Unhealthy devices require a toleration.
// Without counters, at least one device of each physical device can be allocated.
func TestNoDeviceIsUnreachable(t *testing.T) {
	recorded := recordedHosts(t)
	for i, kept := range pooltest.FeatureSets() {
		t.Run(fmt.Sprintf("%+v", kept), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(7, uint64(i)))
			snapshot := discoverytest.RandomHost(random, 70, recorded...)
			v := &view{snapshot: snapshot, withheld: someWithheld(random, snapshot)}
			s := schedulerOf(t, v, kept)
			reached := make(map[string]bool)
			wanted := make(map[string]bool)
			for _, d := range snapshot.Devices {
				request := resourceapi.ExactDeviceRequest{Selectors: pooltest.ByUUID(d.Name)}
				switch {
				case v.withheld[d.Silicon()] != "" || !d.Health.IsUsable() && !kept.Taints:
					continue
				case !d.Health.IsUsable():
					request.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
				}
				wanted[d.Silicon()] = true
				if _, found := s.AllocateDevice("claim", request); found {
					reached[d.Silicon()] = true
					delete(s.Claims, "claim")
				} else if kept.Counters {
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
