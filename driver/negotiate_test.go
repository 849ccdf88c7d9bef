package driver

import (
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
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
)

// The features of an upgraded server are detected.
func TestNegotiateAgain(t *testing.T) {
	old := true
	b := newBench(t)
	b.config.KubeClient = pooltest.ChangingServer(t, func(slice *resourceapi.ResourceSlice) error {
		for i := range slice.Spec.Devices {
			if old {
				slice.Spec.Devices[i].Taints = nil
			}
		}
		return nil
	})
	b.restart().features.Store(nil)
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

// While the API server is unreachable or unhealthy, claims are prepared and nothing is published.
// Later, the features are detected before the first publication.
func TestPublishingWaitsForTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := []error{syscall.ECONNREFUSED, apierrors.NewInternalError(errors.New("no etcd")), apierrors.NewTooManyRequests("later", 1)}
		var answers atomic.Int32
		b, helper := newBench(t), &fakeHelper{}
		b.config.KubeClient = pooltest.ChangingServer(t, func(slice *resourceapi.ResourceSlice) error {
			if n := int(answers.Load()); n < len(down) {
				return down[n]
			}
			for i := range slice.Spec.Devices {
				slice.Spec.Devices[i].Taints = nil
			}
			return nil
		})
		stop := b.run(helper)
		sick := gpu("b", 2)
		sick.Health.Status = discovery.Unhealthy
		b.offers(gpu("a", 1), sick)
		for range down {
			time.Sleep(time.Hour)
			expectPublished(t, helper)
			answers.Add(1)
		}
		if _, err := b.try(claim("c", "a")); err != nil {
			t.Error(err)
		}
		time.Sleep(longestPause)
		expectPublished(t, helper, "a") // the server has no taints
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// A driver that waits for the API server stops at once.
func TestRunEndsWhileItWaitsForTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.config.KubeClient = pooltest.ChangingServer(t, func(*resourceapi.ResourceSlice) error { return syscall.ECONNREFUSED })
		stop := b.run(&fakeHelper{})
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
		b, helper := newBench(t), &fakeHelper{}
		b.config.KubeClient = pooltest.ChangingServer(t, func(slice *resourceapi.ResourceSlice) error {
			if !allowed.Load() {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "", errors.New("no roles yet"))
			}
			return nil
		})
		stop := b.run(helper)
		sick := gpu("a", 1)
		sick.Health.Status = discovery.Unhealthy
		b.offers(sick)
		expectPublished(t, helper)
		time.Sleep(2 * refusalPause)
		expectPublished(t, helper, "")
		if why := b.Refusal(); !strings.Contains(why, "no roles yet") {
			t.Errorf("refused: %q", why)
		}
		allowed.Store(true)
		time.Sleep(2 * b.askInterval / sooner)
		expectPublished(t, helper, "a!unhealthy:NoSchedule")
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
		b, helper := newBench(t), &fakeHelper{}
		b.config.KubeClient = pooltest.ChangingServer(t, func(*resourceapi.ResourceSlice) error {
			if !allowed.Load() {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "", errors.New("no roles yet"))
			}
			return nil
		})
		stop := b.run(helper)
		b.offers(rules.Offered{Device: discovery.Device{Name: "kvm", Shareable: true}})
		time.Sleep(refusalPause / 2)
		allowed.Store(true)
		time.Sleep(longestPause)
		expectPublished(t, helper, "kvm*")
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
		b, helper := newBench(t), &fakeHelper{}
		b.config.KubeClient = pooltest.ChangingServer(t, func(slice *resourceapi.ResourceSlice) error {
			if drops.Load() {
				return pooltest.WithoutCounters(slice)
			}
			return nil
		})
		stop := b.run(helper)
		b.offers(gpu("a", 1))
		expectPublished(t, helper, "a")
		drops.Store(true)
		b.offers(gpu("a", 1), pooltest.PartDevice("g0", "g0", 7), pooltest.PartDevice("g0", "g0-a", 3))
		expectPublished(t, helper, "a g0")
		drops.Store(false)
		b.offers(gpu("a", 1))
		expectPublished(t, helper, "a")
		if b.negotiateFeatures(t.Context()) != nil {
			t.Error("cannot be asked")
		}
		b.offers(gpu("a", 1), pooltest.PartDevice("g0", "g0", 7), pooltest.PartDevice("g0", "g0-a", 3))
		synctest.Wait()
		if diff := cmp.Diff([][]string{{"set:g0", "a g0<g0 g0-a<g0"}}, helper.sketches()); diff != "" {
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
		b, helper := newBench(t), &fakeHelper{}
		b.config.KubeClient = pooltest.ChangingServer(t, func(*resourceapi.ResourceSlice) error { return nil })
		stop := b.run(helper)
		b.offers(gpu("a", 1))
		time.Sleep(time.Second)
		expectPublished(t, helper, "a")
		resource := schema.GroupResource{Resource: "resourceslices"}
		for _, err := range []error{apierrors.NewForbidden(resource, "", nil), syscall.ECONNREFUSED} {
			b.HandleError(t.Context(), errors.Join(err, kubeletplugin.ErrRecoverable), "publish")
			time.Sleep(retryAfter - time.Second)
			expectPublished(t, helper)
			time.Sleep(2 * time.Second)
			expectPublished(t, helper, "a")
			time.Sleep(2 * retryAfter)
			expectPublished(t, helper)
		}
		for _, err := range []error{apierrors.NewConflict(resource, "slice", nil), &resourceslice.DroppedFieldsError{
			DesiredSlice: &resourceapi.ResourceSlice{}, ActualSlice: &resourceapi.ResourceSlice{},
		}} {
			b.HandleError(t.Context(), errors.Join(err, kubeletplugin.ErrRecoverable), "publish")
			time.Sleep(2 * retryAfter)
			expectPublished(t, helper)
		}
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// A refused slice may mean that the server has changed. The features are detected again at once.
func TestRefusedSlicesAreAskedAbout(t *testing.T) {
	b := newBench(t).restart()
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
		t.Error("the server is asked what it takes since somebody was quicker")
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
		b, helper := newBench(t), &fakeHelper{}
		b.config.KubeClient = pooltest.ChangingServer(t, func(*resourceapi.ResourceSlice) error {
			asked.Add(1)
			return syscall.ECONNREFUSED
		})
		stop := b.run(helper)
		b.offers(gpu("a", 1))
		time.Sleep(time.Hour)
		if n := asked.Load(); n < 20 || n > 100 {
			t.Errorf("%d detections in an hour", n)
		}
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}
