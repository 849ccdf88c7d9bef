package fleet_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/fleet"
	"chandler.dev/internal/fleet/fleettest"
)

// A device is reported as free exactly if the scheduler's allocator allocates it to a claim for
// this device.
func TestFreeIsWhatTheAllocatorGives(t *testing.T) {
	seeds := uint64(30)
	if testing.Short() {
		seeds = 8
	}
	for seed := range seeds {
		random := rand.New(rand.NewPCG(seed, 11))
		made, _ := pool.BuildPools(pool.Input{Node: "node", Snapshot: discoverytest.RandomHost(random, 12), Features: features.All()})
		s := pooltest.NewScheduler(t, features.All()).Publish(made)
		for _, slice := range s.Slices {
			for i := range slice.Spec.Devices {
				d := &slice.Spec.Devices[i]
				attributes := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{discovery.Domain + "/uuid": {StringValue: &d.Name}}
				d.Attributes = attributes
				if random.IntN(6) == 0 {
					d.Taints = []resourceapi.DeviceTaint{{Key: discovery.Domain + "/unhealthy", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
				}
			}
		}
		tolerant := []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
		for i := range random.IntN(12) {
			s.AllocateDevice(types.UID(fmt.Sprint("claim-", i)), resourceapi.ExactDeviceRequest{Tolerations: tolerant, AdminAccess: new(random.IntN(8) == 0), Selectors: pooltest.ByUUID(anyName(random, s.Slices))})
		}
		f := fleet.BuildFleet(input(s), discovery.Domain)
		for i := range f.Devices {
			d := &f.Devices[i]
			_, given := s.AllocateDevice("probe", resourceapi.ExactDeviceRequest{Selectors: pooltest.ByUUID(d.Device)})
			delete(s.Claims, "probe")
			if said := d.State == fleet.Free || d.State == fleet.Open; said != given {
				t.Fatalf("seed %d: %s is %s, with holders %v; the allocator gives it: %t", seed, d.Device, d.State, d.Holders, given)
			}
		}
	}
}

func anyName(random *rand.Rand, slices []*resourceapi.ResourceSlice) string {
	var names []string
	for _, slice := range slices {
		for _, d := range slice.Spec.Devices {
			names = append(names, d.Name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return names[random.IntN(len(names))]
}

func input(s *pooltest.Scheduler) (in fleet.Input) {
	for _, slice := range s.Slices {
		in.Slices = append(in.Slices, *slice)
	}
	for _, claim := range s.Claims {
		in.Claims = append(in.Claims, *claim)
	}
	return in
}

// While a pool is being updated, only its newest generation is used.
func TestOldGenerationsDoNotCount(t *testing.T) {
	c := fleettest.New(t)
	c.Node("node", "../../discovery/families/hypervisor/testdata/kvm.host", nil)
	old := *c.Slices[0].DeepCopy()
	old.Name, old.Spec.Pool.Generation = "old", 0
	old.Spec.Devices[0].Name = "gone"
	c.Slices = append(c.Slices, old)
	f := fleet.BuildFleet(c.Input, discovery.Domain)
	for i := range f.Devices {
		if f.Devices[i].Device == "gone" {
			t.Error("a device of an old generation is there")
		}
	}
	if len(f.Devices) != len(c.Slices[0].Spec.Devices) {
		t.Errorf("%d devices, want %d", len(f.Devices), len(c.Slices[0].Spec.Devices))
	}
}

// Ended pods have no allocations, and resources for which the scheduler created a claim are not
// counted twice.
func TestResources(t *testing.T) {
	c := fleettest.New(t)
	c.Node("node", "../../discovery/families/hypervisor/testdata/kvm.host", nil)
	c.AddPlugin("node", "example.com/npu", 8, 6)
	c.AddPlugin("node", "example.com/left", 0, 0)
	c.AddPlugin("node", "hugepages-1Gi", 8, 8)
	c.AddPlugin("node", "example.kubernetes.io/x", 8, 8)
	two := map[string]int64{"example.com/npu": 2}
	c.AddPod("a", "runs", "node", 5, two)
	c.AddPod("a", "ended", "node", 5, two).Status.Phase = corev1.PodSucceeded
	c.AddPod("a", "waits", "", 5, two)
	c.AddPod("a", "by-dra", "node", 5, two).Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{
		ResourceClaimName: "x", RequestMappings: []corev1.ContainerExtendedResourceRequest{{ContainerName: "main", ResourceName: "example.com/npu", RequestName: "r"}},
	}
	f := fleet.BuildFleet(c.Input, discovery.Domain)
	if len(f.Resources) != 1 {
		t.Fatalf("resources: %+v", f.Resources)
	}
	r := f.Resources[0]
	if r.Held != 2 || r.Free() != 4 || r.Unavailable() != 2 || len(r.Holders) != 1 || r.Holders[0].Name() != "a/runs" || r.Holders[0].API() != "plugin" {
		t.Errorf("resource: %+v, %d free, %d out", r, r.Free(), r.Unavailable())
	}
	if since := r.Holders[0].Since; fleettest.Now.Sub(since) != 5*time.Minute {
		t.Errorf("held since %s", since)
	}
}

// A device is found by each of its names.
func TestIs(t *testing.T) {
	c := fleettest.New(t)
	c.Node("node", "../../discovery/families/nvidia/testdata/h100-mig.host", nil)
	f := fleet.BuildFleet(c.Input, discovery.Domain)
	for _, word := range []string{"43:00.0", "0000:43:00.0", "pci-0000-43-00-0", "gpu 43:00.0"} {
		n := 0
		for i := range f.Devices {
			if f.Devices[i].Is(word) {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%s is %d devices", word, n)
		}
	}
	for i := range f.Devices {
		if uuid := fleet.Text(&f.Devices[i].Spec, "uuid"); uuid != "" && !f.Devices[i].Is(uuid) || f.Devices[i].Is("") {
			t.Errorf("%s is not found by its UUID, or is by nothing", f.Devices[i].Device)
		}
	}
}
