package publish

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
)

func TestMain(m *testing.M) {
	// One handler sleeps until a time relative to its last error, which is years later outside a
	// synctest bubble.
	utilruntime.ErrorHandlers = nil
	m.Run()
}

// bench is a publisher without a driver.
type bench struct {
	*Publisher
	input atomic.Pointer[pool.Input]
}

// newBench returns a publisher for the API server. The server keeps all fields if it is nil.
func newBench(t testing.TB, server kubernetes.Interface) *bench {
	if server == nil {
		server = pooltest.KeepingServer(t)
	}
	b := &bench{}
	b.input.Store(&pool.Input{})
	b.Publisher = New(Config{NodeName: "node", NodeUID: nodeUIDOf(server), KubeClient: server, PoolInput: func(time.Time) (pool.Input, time.Time) {
		return *b.input.Load(), time.Time{}
	}})
	return b
}

// offers makes the publisher publish the devices.
func (b *bench) offers(devices ...rules.Offered) {
	b.input.Store(&pool.Input{Node: "node", Snapshot: &rules.Snapshot{Devices: devices}, GoneEffect: resourceapi.DeviceTaintEffectNoSchedule})
	b.NoteChange()
}

// run runs the publisher. The returned function stops it and returns the error of Run.
func (b *bench) run(helper Helper) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx, helper) }()
	return func() error {
		cancel()
		return <-ended
	}
}

// gpu is a device that is healthy.
func gpu(name string) rules.Offered { return rules.Offered{Device: discovery.Device{Name: name}} }

// The features of an upgraded server are detected.
func TestNegotiateAgain(t *testing.T) {
	old := true
	b := newBench(t, pooltest.ChangingServer(t, func(slice *resourceapi.ResourceSlice) error {
		for i := range slice.Spec.Devices {
			if old {
				slice.Spec.Devices[i].Taints = nil
			}
		}
		return nil
	}))
	if features := b.Features(); features != nil {
		t.Errorf("said before the server was asked: %v", features)
	}
	b.negotiateFeatures(t.Context())
	if b.features.Load().Taints || !slices.Contains(b.Features(), features.Feature{Name: "DRADeviceTaints", Kept: false}) {
		t.Fatal("the old server's answer was not noticed")
	}
	old = false
	b.negotiateFeatures(t.Context())
	if *b.features.Load() != features.All() {
		t.Errorf("still %+v", *b.features.Load())
	}
	for _, feature := range b.Features() {
		if !feature.Kept {
			t.Errorf("%s: not kept", feature.Name)
		}
	}
}

// While the API server is unreachable or unhealthy, nothing is published.
// Later, the features are detected before the first publication.
func TestPublishingWaitsForTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := []error{syscall.ECONNREFUSED, apierrors.NewInternalError(errors.New("no etcd")), apierrors.NewTooManyRequests("later", 1)}
		var answers atomic.Int32
		helper := &pooltest.Helper{}
		b := newBench(t, pooltest.ChangingServer(t, func(slice *resourceapi.ResourceSlice) error {
			if n := int(answers.Load()); n < len(down) {
				return down[n]
			}
			for i := range slice.Spec.Devices {
				slice.Spec.Devices[i].Taints = nil
			}
			return nil
		}))
		stop := b.run(helper)
		sick := gpu("b")
		sick.Health.Status = discovery.Unhealthy
		b.offers(gpu("a"), sick)
		for range down {
			time.Sleep(time.Hour)
			pooltest.ExpectPublished(t, helper)
			answers.Add(1)
		}
		time.Sleep(longestPause)
		pooltest.ExpectPublished(t, helper, "a") // the server has no taints
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// A driver that waits for the API server stops at once.
func TestRunEndsWhileItWaitsForTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, pooltest.ChangingServer(t, func(*resourceapi.ResourceSlice) error { return syscall.ECONNREFUSED }))
		stop := b.run(&pooltest.Helper{})
		synctest.Wait()
		start := time.Now()
		if err := stop(); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took > 0 { // time of the bubble
			t.Errorf("Run took %s to end", took)
		}
	})
}

// To a server that refuses every detection, only the required fields are published, and detection
// is soon repeated. A server that refuses only at first gets all of its features, and nothing
// before.
func TestRefusalIsNotForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var allowed atomic.Bool
		helper := &pooltest.Helper{}
		b := newBench(t, pooltest.ChangingServer(t, func(slice *resourceapi.ResourceSlice) error {
			if !allowed.Load() {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "", errors.New("no roles yet"))
			}
			return nil
		}))
		stop := b.run(helper)
		sick := gpu("a")
		sick.Health.Status = discovery.Unhealthy
		b.offers(sick)
		pooltest.ExpectPublished(t, helper)
		time.Sleep(2 * refusalPause)
		pooltest.ExpectPublished(t, helper, "")
		if why := b.Refusal(); !strings.Contains(why, "no roles yet") {
			t.Errorf("refused: %q", why)
		}
		allowed.Store(true)
		time.Sleep(2 * b.askInterval / sooner)
		pooltest.ExpectPublished(t, helper, "a!unhealthy:NoSchedule")
		if why := b.Refusal(); why != "" {
			t.Errorf("still refused: %q", why)
		}
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

func TestFirstRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var allowed atomic.Bool
		helper := &pooltest.Helper{}
		b := newBench(t, pooltest.ChangingServer(t, func(*resourceapi.ResourceSlice) error {
			if !allowed.Load() {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "", errors.New("no roles yet"))
			}
			return nil
		}))
		stop := b.run(helper)
		b.offers(rules.Offered{Device: discovery.Device{Name: "kvm", Shareable: true}})
		time.Sleep(refusalPause / 2)
		allowed.Store(true)
		time.Sleep(longestPause)
		pooltest.ExpectPublished(t, helper, "kvm*")
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// Features are detected again before competing devices are published for the first time, since the
// server may drop counters by now.
func TestCountersAreAskedForBeforeTheyAreNeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var drops atomic.Bool
		helper := &pooltest.Helper{}
		b := newBench(t, pooltest.ChangingServer(t, func(slice *resourceapi.ResourceSlice) error {
			if drops.Load() {
				return pooltest.WithoutCounters(slice)
			}
			return nil
		}))
		stop := b.run(helper)
		b.offers(gpu("a"))
		pooltest.ExpectPublished(t, helper, "a")
		drops.Store(true)
		b.offers(gpu("a"), pooltest.PartDevice("g0", "g0", 7), pooltest.PartDevice("g0", "g0-a", 3))
		pooltest.ExpectPublished(t, helper, "a g0")
		drops.Store(false)
		b.offers(gpu("a"))
		pooltest.ExpectPublished(t, helper, "a")
		if b.negotiateFeatures(t.Context()) != nil {
			t.Error("cannot be asked")
		}
		b.offers(gpu("a"), pooltest.PartDevice("g0", "g0", 7), pooltest.PartDevice("g0", "g0-a", 3))
		synctest.Wait()
		if diff := cmp.Diff([][]string{{"set:g0", "a g0<g0 g0-a<g0"}}, helper.PublishedSketches()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// Slices that could not be written are published again before the library's next try, whose delays
// double up to 1,000 s. Conflicts and fields that the server drops cause no new publication.
func TestFailedSlicesAreSaidAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		helper := &pooltest.Helper{}
		b := newBench(t, pooltest.ChangingServer(t, func(*resourceapi.ResourceSlice) error { return nil }))
		stop := b.run(helper)
		b.offers(gpu("a"))
		time.Sleep(time.Second)
		pooltest.ExpectPublished(t, helper, "a")
		resource := schema.GroupResource{Resource: "resourceslices"}
		for _, err := range []error{apierrors.NewForbidden(resource, "", nil), syscall.ECONNREFUSED} {
			b.HandleError(t.Context(), errors.Join(err, kubeletplugin.ErrRecoverable), "publish")
			time.Sleep(retryAfter - time.Second)
			pooltest.ExpectPublished(t, helper)
			time.Sleep(retryAfter/2 + 2*time.Second)
			pooltest.ExpectPublished(t, helper, "a")
			time.Sleep(2 * retryAfter)
			pooltest.ExpectPublished(t, helper)
		}
		for _, err := range []error{apierrors.NewConflict(resource, "slice", nil), &resourceslice.DroppedFieldsError{
			DesiredSlice: &resourceapi.ResourceSlice{}, ActualSlice: &resourceapi.ResourceSlice{},
		}} {
			b.HandleError(t.Context(), errors.Join(err, kubeletplugin.ErrRecoverable), "publish")
			time.Sleep(2 * retryAfter)
			pooltest.ExpectPublished(t, helper)
		}
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// Nodes whose writes fail at the same time publish again at different times.
func TestFailedSlicesAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		times := make(map[time.Time]bool)
		for range 3 {
			b := newBench(t, pooltest.ChangingServer(t, func(*resourceapi.ResourceSlice) error { return nil }))
			b.HandleError(t.Context(), errors.Join(syscall.ECONNREFUSED, kubeletplugin.ErrRecoverable), "publish")
			times[*b.writeFailed.Load()] = true
		}
		if len(times) < 2 {
			t.Errorf("the writes are repeated at %v", times)
		}
	})
}

// A refused slice may mean that the server has changed. The features are detected again at once.
func TestRefusedSlicesAreAskedAbout(t *testing.T) {
	b := newBench(t, nil)
	invalid := apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "slice", nil)
	b.HandleError(t.Context(), errors.Join(fmt.Errorf("update resource slice: %w", invalid), kubeletplugin.ErrRecoverable), "publish")
	if !b.featuresDoubted.Swap(false) {
		t.Error("a refused slice: the server is not asked what it takes")
	}
	webhook := apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "slice", errors.New("admission webhook denied the request"))
	b.HandleError(t.Context(), errors.Join(webhook, kubeletplugin.ErrRecoverable), "publish")
	if !b.featuresDoubted.Swap(false) {
		t.Error("a slice that a webhook denies: the server is not asked what it takes")
	}
	overtaken := apierrors.NewConflict(schema.GroupResource{Resource: "resourceslices"}, "slice", nil)
	b.HandleError(t.Context(), errors.Join(overtaken, kubeletplugin.ErrRecoverable), "publish")
	if b.featuresDoubted.Swap(false) {
		t.Error("the features of the server are detected again after a conflict")
	}
	// The same applies to a dropped field unknown to the library.
	slice := func(d resourceapi.Device) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{d}}}
	}
	dropped := &resourceslice.DroppedFieldsError{
		DesiredSlice: slice(resourceapi.Device{Name: "a", NodeAllocatableResources: map[corev1.ResourceName]resourceapi.NodeAllocatableResource{"cpu": {}}}),
		ActualSlice:  slice(resourceapi.Device{Name: "a"}),
	}
	b.HandleError(t.Context(), errors.Join(dropped, kubeletplugin.ErrRecoverable), "publish")
	if !b.featuresDoubted.Swap(false) {
		t.Error("a dropped field: the server is not asked what it takes")
	}
}

// longestPause is longer than any pause between two detections after failures.
const longestPause = 4 * time.Minute

// Detections that fail become rarer, down to one in minutes.
func TestDetectionsBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		helper := &pooltest.Helper{}
		b := newBench(t, pooltest.ChangingServer(t, func(*resourceapi.ResourceSlice) error {
			asked.Add(1)
			return syscall.ECONNREFUSED
		}))
		stop := b.run(helper)
		b.offers(gpu("a"))
		time.Sleep(time.Hour)
		if n := asked.Load(); n < 20 || n > 100 {
			t.Errorf("%d detections in an hour", n)
		}
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

func TestDroppedFieldsArePublishedOtherwise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t, nil), &pooltest.Helper{}
		stop := b.run(helper)
		synctest.Wait()
		sick := gpu("a")
		sick.Health.Status = discovery.Unhealthy
		b.offers(sick)
		pooltest.ExpectPublished(t, helper, "a!unhealthy:NoSchedule")
		slice := func(taints ...resourceapi.DeviceTaint) *resourceapi.ResourceSlice {
			return &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{Name: "a", Taints: taints}}}}
		}
		dropped := &resourceslice.DroppedFieldsError{DesiredSlice: slice(resourceapi.DeviceTaint{}), ActualSlice: slice()}
		b.HandleError(t.Context(), errors.Join(dropped, kubeletplugin.ErrRecoverable), "publish")
		pooltest.ExpectPublished(t, helper, "")
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// The pool of thousands of devices is computed again only if its input has changed.
func TestPoolIsKeptWhileItsInputIsTheSame(t *testing.T) {
	b := newBench(t, nil)
	snapshot := &rules.Snapshot{Devices: []rules.Offered{gpu("a"), gpu("b")}}
	s := &schedule{}
	look := func(snapshot *rules.Snapshot, withheld map[string]string) *resourceslice.DriverResources {
		b.input.Store(&pool.Input{Node: "node", Snapshot: snapshot, Withheld: withheld})
		b.refresh(s)
		return s.wanted
	}
	first := look(snapshot, nil)
	if look(snapshot, map[string]string{}) != first {
		t.Error("the pool is computed again although nothing has changed")
	}
	withheld := look(snapshot, map[string]string{"a": "another API offers it"})
	if withheld == first {
		t.Error("the pool is the same although a device is withheld")
	}
	if other := look(&rules.Snapshot{Devices: snapshot.Devices[:1]}, nil); other == withheld || len(pool.SlicesOf(*other)[0].Devices) != 1 {
		t.Error("the pool is the same although the devices have changed")
	}
	one := s.wanted
	all := features.All()
	b.features.Store(&all)
	if b.refresh(s); s.wanted == one {
		t.Error("the pool is the same although the API server keeps more")
	}
	s.last = s.wanted
	if b.refresh(s); s.wanted != s.last {
		t.Error("the published pool is not the wanted one")
	}
	written := *s.last
	b.lastPools.Store(&written)
	if b.refresh(s); s.wanted != &written || s.last != &written {
		t.Error("the devices of the published pool are still in memory beside those that the library has written")
	}
}
