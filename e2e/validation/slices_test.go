package validation

import (
	"context"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/kubernetes/pkg/features"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	dra "chandler.dev/driver/features"
	"chandler.dev/driver/pool"
)

// recordedHosts returns the snapshots of all recorded hosts by all families, in the order of files.
func recordedHosts(t *testing.T) (files []string, snapshots []*discovery.Snapshot) {
	t.Helper()
	files, err := filepath.Glob("../../discovery/families/*/testdata/*.host")
	if err != nil || len(files) == 0 {
		t.Fatalf("no recorded hosts (%v)", err)
	}
	for _, file := range files {
		snapshots = append(snapshots, scan.ReadHost(discoverytest.ReadHost(t, file), families.All))
	}
	return files, snapshots
}

// negotiate returns the features that the driver finds at a server with the gates of this process.
// It checks that they match the gates.
func negotiate(t *testing.T, g gates) dra.Set {
	t.Helper()
	_, client := newServer()
	kept, err := dra.DetectFeatures(t.Context(), client, "node")
	if err != nil {
		t.Fatalf("negotiate: %v", err)
	}
	for gate, wrong := range map[string]bool{
		"DRADeviceTaints":                 kept.Taints != g[features.DRADeviceTaints],
		"taints without effect":           kept.NoEffectTaints != g[features.DRADeviceTaints],
		"DRAPartitionableDevices":         kept.Counters != g[features.DRAPartitionableDevices],
		"counters in slices of their own": kept.Separate != g[features.DRAPartitionableDevices],
		"DRAConsumableCapacity":           kept.Sharing != g[features.DRAConsumableCapacity],
		"DRADeviceCompatibilityGroups":    kept.Groups != g[features.DRADeviceCompatibilityGroups],
		"DRAPartitionableDevicesType":     kept.PartitionType != g[features.DRAPartitionableDevicesType],
		"DRAListTypeAttributes":           kept.Lists != g[features.DRAListTypeAttributes],
		"DRADeviceBindingConditions":      kept.Bindings != g[features.DRADeviceBindingConditions],
		"DRANodeAllocatableResources":     kept.Overhead != g[features.DRANodeAllocatableResources],
	} {
		if wrong {
			t.Errorf("of %s the driver finds %+v", gate, kept)
		}
	}
	return kept
}

// objects returns the slices of a snapshot as they are created.
func objects(t *testing.T, snapshot *rules.Snapshot, kept dra.Set) []*resourceapi.ResourceSlice {
	t.Helper()
	published, problems := pool.BuildPools(pool.Input{Node: "node", Snapshot: snapshot, Features: kept})
	for _, problem := range problems {
		t.Errorf("left out: %v", problem)
	}
	var all []*resourceapi.ResourceSlice
	for _, slice := range pool.SliceObjects("node", published).Items {
		slice.Name, slice.GenerateName = "", slice.Name+"-"
		all = append(all, &slice)
	}
	return all
}

// stored holds a server's slices of one host, by pool.
type stored map[string][]*resourceapi.ResourceSlice

// publish updates existing slices and creates new ones. It expects the server to keep each slice
// unchanged.
func (s *stored) publish(t *testing.T, host string, slices []*resourceapi.ResourceSlice) {
	t.Helper()
	now := make(stored)
	for _, slice := range slices {
		var old *resourceapi.ResourceSlice
		pool := slice.Spec.Pool.Name
		i := len(now[pool])
		if i < len((*s)[pool]) {
			old = (*s)[pool][i]
			slice.ObjectMeta = *old.ObjectMeta.DeepCopy()
		}
		slice = defaulted(slice)
		kept, err := admit(slice, old)
		if err != nil {
			t.Errorf("%s: slice %d of pool %s is refused: %v", host, i, pool, err)
			continue
		}
		if !equality.Semantic.DeepEqual(slice.Spec, kept.Spec) {
			t.Errorf("%s: slice %d of pool %s (-published +kept):\n%s", host, i, pool, cmp.Diff(slice.Spec, kept.Spec))
		}
		kept.ResourceVersion = "1"
		now[pool] = append(now[pool], kept)
	}
	*s = now
}

// TestServerKeepsWhatIsPublished publishes hosts under all combinations of gates. With the features
// that the driver finds, the server must refuse no slice and keep each slice completely. Slices are
// new, or they update slices of another host that were published under other gates.
func TestServerKeepsWhatIsPublished(t *testing.T) {
	files, recorded := recordedHosts(t)
	before, random := make([]stored, len(files)), stored{}
	for i, g := range combinations() {
		if testing.Short() && i%10 > 0 {
			continue
		}
		t.Run(g.String(), func(t *testing.T) {
			g.set(t)
			kept := negotiate(t, g)
			var group sync.WaitGroup
			defer group.Wait()
			for j, snapshot := range recorded {
				group.Go(func() { before[j].publish(t, files[j], objects(t, (&rules.Rules{}).ApplyTo(snapshot), kept)) })
			}
			group.Go(func() {
				numbers := rand.New(rand.NewPCG(uint64(i), 0))
				most := []int{10, 100, 1024}[numbers.IntN(3)]
				host := discoverytest.RandomHost(numbers, 1+numbers.IntN(most), recorded...)
				if i%2 > 0 {
					random = nil // All slices are new.
				}
				random.publish(t, "random", objects(t, host, kept))
			})
		})
	}
}

// TestControllerPublishesWithoutErrors lets the library's controller publish one host after
// another. It must report no errors, and the server must have the published slices.
func TestControllerPublishesWithoutErrors(t *testing.T) {
	for i, g := range combinations() {
		if i%20 > 0 {
			continue
		}
		t.Run(g.String(), func(t *testing.T) {
			g.set(t)
			kept := negotiate(t, g)
			synctest.Test(t, func(t *testing.T) { publishInTurn(t, rand.New(rand.NewPCG(uint64(i), 1)), kept) })
		})
	}
}

func publishInTurn(t *testing.T, random *rand.Rand, kept dra.Set) {
	server, client := newServer()
	controller, err := resourceslice.StartController(t.Context(), resourceslice.Options{
		DriverName: discovery.Domain, KubeClient: client,
		Owner: &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: "node", UID: "uid"},
		// Otherwise the controller repeats its work endlessly while the fake time stands still.
		MutationCacheTTL: new(365 * 24 * time.Hour),
		ErrorHandler:     func(_ context.Context, err error, msg string) { t.Errorf("%s: %v", msg, err) },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer controller.Stop()
	for range 4 {
		host := discoverytest.RandomHost(random, 1+random.IntN(150))
		published, _ := pool.BuildPools(pool.Input{Node: "node", Snapshot: host, Features: kept})
		controller.Update(&published)
		time.Sleep(2 * resourceslice.DefaultMutationCacheTTL) // in the bubble's fake time
		server.compare(t, published)
	}
}
