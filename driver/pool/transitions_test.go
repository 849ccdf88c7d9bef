package pool

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

// sliceServer stores ResourceSlices and calls written after each write.
type sliceServer struct {
	tracker clienttesting.ObjectTracker
	client  *fake.Clientset
	writes  int
	written func([]*resourceapi.ResourceSlice)
}

func newSliceServer(written func([]*resourceapi.ResourceSlice)) *sliceServer {
	s := &sliceServer{
		tracker: clienttesting.NewObjectTracker(scheme.Scheme, scheme.Codecs.UniversalDecoder()),
		client:  &fake.Clientset{}, written: written,
	}
	s.client.AddReactor("*", "resourceslices", s.react)
	s.client.AddWatchReactor("*", func(action clienttesting.Action) (bool, watch.Interface, error) {
		w, err := s.tracker.Watch(action.GetResource(), "")
		return true, w, err
	})
	return s
}

// react sets names and resource versions of written objects, and calls written after each write.
func (s *sliceServer) react(action clienttesting.Action) (bool, runtime.Object, error) {
	change, changes := action.(interface{ GetObject() runtime.Object })
	if changes {
		s.writes++
		slice := change.GetObject().(*resourceapi.ResourceSlice)
		if slice.Name == "" {
			slice.Name, slice.UID = fmt.Sprint(slice.GenerateName, s.writes), types.UID(fmt.Sprint("uid-", s.writes))
		}
		slice.ResourceVersion = fmt.Sprint(s.writes)
	}
	handled, object, err := clienttesting.ObjectReaction(s.tracker)(action)
	if changes || action.GetVerb() == "delete" {
		s.written(s.slices())
	}
	return handled, object, err
}

func (s *sliceServer) slices() (all []*resourceapi.ResourceSlice) {
	list, err := s.tracker.List(resourceapi.SchemeGroupVersion.WithResource("resourceslices"), resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"), "")
	if err != nil {
		panic(err) // the scheme has the kind
	}
	for i := range list.(*resourceapi.ResourceSliceList).Items {
		all = append(all, &list.(*resourceapi.ResourceSliceList).Items[i])
	}
	return all
}

// A change of the server's features or of the devices takes several writes. After each write, no
// scheduler can allocate a whole device together with one of its partitions: neither the present
// scheduler nor that of 1.34, which uses incomplete pools.
func TestWholesAndPartsAreNeverBothToBeHad(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { changeInTurn(t, rand.New(rand.NewPCG(seed, 3))) })
		})
	}
}

func changeInTurn(t *testing.T, random *rand.Rand) {
	var offered string // for the message
	server := newSliceServer(func(slices []*resourceapi.ResourceSlice) {
		if pair := bothToBeHad(t, slices); pair != "" {
			t.Errorf("while %s is published: %s", offered, pair)
		}
		if pair := bothBefore135(slices); pair != "" {
			t.Errorf("while %s is published to 1.34: %s", offered, pair)
		}
	})
	controller, err := resourceslice.StartController(t.Context(), resourceslice.Options{
		DriverName: discovery.Domain, KubeClient: server.client,
		Owner:            &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: "node", UID: "uid"},
		MutationCacheTTL: new(365 * 24 * time.Hour), // avoids endless work at the end of the TTL
		ErrorHandler:     func(_ context.Context, err error, msg string) { t.Errorf("%s: %v", msg, err) },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer controller.Stop()
	servers := []features.Set{
		features.All(), {}, without("SeparateCounters", "DRADeviceCompatibilityGroups", "DRAPartitionableDevicesType"), without("DRADeviceCompatibilityGroups"),
		without("DRAPartitionableDevices", "DRADeviceCompatibilityGroups", "DRAPartitionableDevicesType"),
	}
	in := Input{
		Node:       "node",
		Claims:     []*allocation.Claim{hold(heldPart, "gpu-0", false, pooltest.Quantities("slices", 1))}, // in the snapshot or gone
		GoneEffect: resourceapi.DeviceTaintEffectNoSchedule,
	}
	for range 12 {
		in.Snapshot, in.Features = gpusInParts(random), servers[random.IntN(len(servers))]
		in.Last, _ = BuildPools(in)
		offered = fmt.Sprintf("%d devices, %+v", len(in.Snapshot.Devices), in.Features)
		controller.Update(&in.Last)
		time.Sleep(2 * resourceslice.DefaultMutationCacheTTL) // time of the bubble
		if n := len(server.slices()); n != len(SlicesOf(in.Last)) {
			t.Fatalf("%s: %d slices, want %d", offered, n, len(SlicesOf(in.Last)))
		}
	}
	if server.writes < 10 {
		t.Errorf("only %d writes", server.writes)
	}
}

// heldPart is a partition that stays allocated to a claim.
const heldPart = "gpu-0-part-0"

// gpusInParts returns GPUs with partitions, and other devices that shift the GPUs between slices.
func gpusInParts(random *rand.Rand) *rules.Snapshot {
	s := &rules.Snapshot{}
	add := func(d rules.Offered) {
		d.Attributes = discovery.Attributes{}
		d.Attributes.SetString("uuid", d.Name)
		s.Devices = append(s.Devices, d)
	}
	for i := range random.IntN(100) {
		add(rules.Offered{Device: discovery.Device{Name: fmt.Sprintf("a-%03d", i)}})
	}
	for i := range random.IntN(12) {
		name := fmt.Sprintf("gpu-%d", i)
		add(pooltest.PartDevice(name, name, 7))
		for j := range random.IntN(8) {
			add(pooltest.PartDevice(name, fmt.Sprintf("%s-part-%d", name, j), 1))
		}
	}
	return s
}

// current returns the slices of the newest generation.
func current(slices []*resourceapi.ResourceSlice) (newest []*resourceapi.ResourceSlice) {
	for _, slice := range slices {
		switch {
		case len(newest) == 0 || slice.Spec.Pool.Generation > newest[0].Spec.Pool.Generation:
			newest = []*resourceapi.ResourceSlice{slice}
		case slice.Spec.Pool.Generation == newest[0].Spec.Pool.Generation:
			newest = append(newest, slice)
		}
	}
	return newest
}

// bothToBeHad returns a whole device and a partition if the library's allocator allocates them to
// two claims, or allocates the whole device together with heldPart. Otherwise it returns "".
func bothToBeHad(t *testing.T, slices []*resourceapi.ResourceSlice) string {
	t.Helper()
	for _, pair := range pairs(slices) {
		s := pooltest.NewScheduler(t, features.All())
		s.Slices = slices
		s.Claims["held"] = &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{Driver: discovery.Domain, Pool: "node/other", Device: heldPart}}},
		}}}
		given := 0
		for _, name := range pair {
			if name == heldPart {
				given++
			} else if _, found := s.AllocateDevice(types.UID(name), resourceapi.ExactDeviceRequest{Selectors: pooltest.ByUUID(name)}); found {
				given++
			}
		}
		if given == 2 {
			return fmt.Sprint(pair)
		}
	}
	return ""
}

// pairs returns a partition and its whole device, in both orders, for each physical device with
// both in the slices.
func pairs(slices []*resourceapi.ResourceSlice) (out [][2]string) {
	there := make(map[string]bool)
	for _, slice := range slices {
		for _, device := range slice.Spec.Devices {
			there[device.Name] = true
		}
	}
	for i := range 12 {
		whole := fmt.Sprintf("gpu-%d", i)
		for j := range 8 {
			if p := fmt.Sprintf("%s-part-%d", whole, j); there[whole] && there[p] {
				out = append(out, [2]string{p, whole}, [2]string{whole, p})
				break
			}
		}
	}
	return out
}

// bothBefore135 does the same for the scheduler of 1.34, which uses the existing slices of the
// newest generation and counts within a slice (structured/internal/incubating of
// k8s.io/dynamic-resource-allocation 0.34).
func bothBefore135(slices []*resourceapi.ResourceSlice) string {
	silicon := make(map[string]string) // slice and counter set of a device
	newest := current(slices)
	for _, slice := range newest {
		sets := make(map[string]bool)
		for _, set := range slice.Spec.SharedCounters {
			sets[set.Name] = true
		}
		for _, device := range slice.Spec.Devices {
			silicon[device.Name] = "nowhere, like " + device.Name
			if consumesCounters(device) && !sets[device.ConsumesCounters[0].CounterSet] {
				silicon[device.Name] = "refused" // by the server of 1.34
			} else if consumesCounters(device) {
				silicon[device.Name] = slice.Name + "/" + device.ConsumesCounters[0].CounterSet
			}
		}
	}
	for _, pair := range pairs(newest) {
		if silicon[pair[0]] != "refused" && silicon[pair[1]] != "refused" && silicon[pair[0]] != silicon[pair[1]] {
			return fmt.Sprint(pair)
		}
	}
	return ""
}
