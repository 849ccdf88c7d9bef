package nvidia_test

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/families/nvidia/migtest"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
)

// partitionedHost is a host with a GPU that may be partitioned, and the instances that an agent created.
type partitionedHost struct {
	*migtest.GPU

	ours map[string]map[string]string // the records of units
}

func (h *partitionedHost) tools() discovery.Tools {
	return discovery.Tools{
		ChangePartition: h.ChangePartition,
		AmendRecord: func(unit string, how map[string]string) error {
			if now := h.ours[unit]; now != nil {
				maps.Copy(now, how)
			}
			return nil
		},
		RemoveRecord: func(unit string) error { delete(h.ours, unit); return nil },
	}
}

func (h *partitionedHost) host() *discovery.Host {
	return &discovery.Host{
		FS:            h.Files(),
		Partitionings: []discovery.Selection[struct{}]{{Selects: func(discovery.Device) (bool, error) { return true, nil }}},
		CreatedUnit: func(unit string) (map[string]string, bool) {
			how, made := h.ours[unit]
			return how, made
		},
	}
}

// scan returns the devices and reports every problem as a test error.
func (h *partitionedHost) scan(t *testing.T) *rules.Snapshot {
	t.Helper()
	snapshot := (&rules.Rules{}).ApplyTo(scan.ReadHost(h.host(), []*discovery.Family{nvidia.Family}))
	for _, problem := range snapshot.Problems {
		t.Errorf("problem: %v", problem)
	}
	for _, d := range snapshot.Devices {
		if d.Health.Status != discovery.Healthy {
			t.Errorf("%s: %+v", d.Name, d.Health)
		}
	}
	return snapshot
}

var sequences = flag.Int("sequences", 100, "how many random sequences of claims TestPacking makes; see make simulate")

// For random claims, instances that stay after their claims, and instances that an administrator
// creates manually: everything that the Kubernetes scheduler allocates can be created under the
// NVIDIA rules, and no instance remains after all are released.
func TestPacking(t *testing.T) {
	for model, profiles := range migtest.Layouts {
		t.Run(model, func(t *testing.T) {
			t.Parallel()
			allocated := 0
			for seed := range *sequences/len(migtest.Layouts) + 1 {
				allocated += pack(t, rand.New(rand.NewPCG(uint64(seed), 13)), &partitionedHost{&migtest.GPU{Profiles: profiles}, make(map[string]map[string]string)})
				if t.Failed() {
					t.Fatalf("seed %d", seed)
				}
			}
			t.Logf("%d claims", allocated)
		})
	}
}

func pack(t *testing.T, random *rand.Rand, gpu *partitionedHost) (allocated int) {
	empty := names(gpu.scan(t))
	held := make(map[types.UID]string) // places of claims
	gpu.Refuse = func(arg string) error {
		if place := strings.TrimPrefix(arg, "--remove="); slices.Contains(slices.Collect(maps.Values(held)), place) && place != arg {
			t.Errorf("%s is removed while it is allocated", place)
		}
		return nil
	}
	s := pooltest.NewScheduler(t, features.All())
	warm := make(map[string]bool)                   // instances without a consumer
	makings := make(map[string]*discovery.Creation) // by device
	byHand := make(map[string]bool)                 // instances of an administrator
	place := make(map[string]string)                // by device
	there := make(map[string]bool)                  // existing devices
	publish := func() {
		snapshot := gpu.scan(t)
		clear(there)
		for _, d := range snapshot.Devices {
			if d.Creation != nil {
				place[d.Name], makings[d.Name] = d.Creation.How["place"], d.Creation
			} else {
				there[d.Name] = true
			}
		}
		made, problems := pool.BuildPools(pool.Input{Node: "node", Snapshot: snapshot, Features: features.All()})
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		s.Publish(made)
	}
	for step := range 8 {
		publish()
		for i := range 1 + random.IntN(3) { // before the next scan
			uid := types.UID(fmt.Sprint(step, "-", i))
			wanted := gpu.Profiles[random.IntN(len(gpu.Profiles))].Name
			claim, ok := s.AllocateDevice(uid, resourceapi.ExactDeviceRequest{Selectors: []resourceapi.DeviceSelector{{
				CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf(`device.attributes["chandler.dev"].profile == %q`, wanted)},
			}}})
			if !ok {
				continue
			}
			allocated++
			device := claim.Status.Allocation.Devices.Results[0].Device
			if !there[device] {
				work, err := nvidia.Family.Create(gpu.host(), gpu.tools(), *makings[device])
				if err == nil {
					gpu.ours[device] = make(map[string]string)
					err = work(t.Context())
				}
				if err != nil {
					t.Errorf("%s was allocated and cannot be created: %v; there are %+v", device, err, gpu.Instances())
				}
			}
			held[uid] = place[device]
			delete(warm, place[device])
		}
		for _, uid := range slices.Sorted(maps.Keys(s.Claims)) {
			if random.IntN(3) == 0 {
				warm[held[uid]] = true
				delete(s.Claims, uid)
				delete(held, uid)
			}
		}
		for _, place := range slices.Sorted(maps.Keys(warm)) {
			if !byHand[place] && random.IntN(4) == 0 {
				gpu.Remove(place)
				delete(warm, place)
				delete(gpu.ours, unitAt(place))
			}
		}
		if p := gpu.Profiles[random.IntN(len(gpu.Profiles))]; random.IntN(8) == 0 {
			by := fmt.Sprintf("%s@%d", p.Name, p.Placements[random.IntN(len(p.Placements))].Start)
			if gpu.CreateInstance(by) == nil {
				byHand[by] = true
				delete(gpu.ours, unitAt(by))
			}
		}
	}
	for _, place := range gpu.Instances() {
		gpu.Remove(place)
	}
	if left := names(gpu.scan(t)); !slices.Equal(left, empty) {
		t.Errorf("left are %v, want %v", left, empty)
	}
	return allocated
}

// unitAt returns the unit that is created at a place.
func unitAt(place string) string {
	profile, at, _ := strings.Cut(place, "@")
	return "pci-0000-1b-00-0-mig-" + strings.NewReplacer(".", "-", "+", "-").Replace(profile) + "-at-" + at
}

func names(s *rules.Snapshot) (all []string) {
	for _, d := range s.Devices {
		all = append(all, d.Name)
	}
	return all
}
