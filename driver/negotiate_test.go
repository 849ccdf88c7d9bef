package driver

import (
	"errors"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"chandler.dev/discovery"
)

// dropping returns a client of an API server that changes the slices that it is
// to create, or refuses them.
func dropping(t *testing.T, change func(*resourceapi.ResourceSlice) error) *fake.Clientset {
	client := fake.NewClientset()
	client.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		create := action.(clienttesting.CreateActionImpl)
		if len(create.CreateOptions.DryRun) == 0 {
			t.Error("a slice is created in earnest")
		}
		slice := create.Object.(*resourceapi.ResourceSlice).DeepCopy()
		if slice.Spec.Driver != "chandler.dev" || slice.Spec.Pool.Name != "node" || *slice.Spec.NodeName != "node" {
			t.Errorf("an admission policy would not let this pass: %v", slice.Spec)
		}
		return true, slice, change(slice)
	})
	return client
}

// refusing returns a server that refuses some slices as invalid.
func refusing(invalid func(*resourceapi.ResourceSlice) bool) func(*resourceapi.ResourceSlice) error {
	return func(slice *resourceapi.ResourceSlice) error {
		if invalid(slice) {
			return apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "", nil)
		}
		return nil
	}
}

// effectless reports whether a device has a taint without an effect.
func effectless(slice *resourceapi.ResourceSlice) bool {
	return slices.ContainsFunc(slice.Spec.Devices, func(d resourceapi.Device) bool {
		return len(d.Taints) > 0 && d.Taints[0].Effect == resourceapi.DeviceTaintEffectNone
	})
}

// apart reports whether a device takes of counters that are not in the slice.
func apart(slice *resourceapi.ResourceSlice) bool {
	return len(slice.Spec.SharedCounters) == 0 && slices.ContainsFunc(slice.Spec.Devices, consumes)
}

// listed reports whether an attribute is a list.
func listed(slice *resourceapi.ResourceSlice) bool {
	return slices.ContainsFunc(slice.Spec.Devices, func(d resourceapi.Device) bool { return len(withoutLists(d.Attributes)) < len(d.Attributes) })
}

func withoutCounters(slice *resourceapi.ResourceSlice) error {
	slice.Spec.SharedCounters, slice.Spec.PartitionTypeAttribute = nil, nil
	for i := range slice.Spec.Devices {
		slice.Spec.Devices[i].ConsumesCounters = nil
	}
	return nil
}

func withoutGroups(slice *resourceapi.ResourceSlice) error {
	for i := range slice.Spec.Devices {
		for j := range slice.Spec.Devices[i].ConsumesCounters {
			slice.Spec.Devices[i].ConsumesCounters[j].CompatibilityGroups = nil
		}
	}
	return nil
}

func TestNegotiate(t *testing.T) {
	each := func(change func(*resourceapi.Device)) func(*resourceapi.ResourceSlice) error {
		return func(slice *resourceapi.ResourceSlice) error {
			for i := range slice.Spec.Devices {
				change(&slice.Spec.Devices[i])
			}
			return nil
		}
	}
	tests := map[string]struct {
		server func(*resourceapi.ResourceSlice) error
		config Without
		want   Without
	}{
		"keeps all":           {server: each(func(*resourceapi.Device) {})},
		"drops taints":        {server: each(func(d *resourceapi.Device) { d.Taints = nil }), want: Without{Taints: true, Told: true}},
		"drops policies":      {server: each(func(d *resourceapi.Device) { d.Capacity = nil }), want: Without{Sharing: true}},
		"drops sharing":       {server: each(func(d *resourceapi.Device) { d.AllowMultipleAllocations = nil }), want: Without{Sharing: true}},
		"drops counters":      {server: withoutCounters, want: Without{Counters: true, Groups: true, PartitionType: true}},
		"drops overhead":      {server: each(func(d *resourceapi.Device) { d.NodeAllocatableResources = nil }), want: Without{Overhead: true}},
		"drops conditions":    {server: each(func(d *resourceapi.Device) { d.BindingConditions, d.BindingFailureConditions = nil, nil }), want: Without{Bindings: true}},
		"drops types":         {server: func(s *resourceapi.ResourceSlice) error { s.Spec.PartitionTypeAttribute = nil; return nil }, want: Without{PartitionType: true}},
		"drops groups":        {server: withoutGroups, want: Without{Groups: true}},
		"refuses lists":       {server: refusing(listed), want: Without{Lists: true}},
		"what is known stays": {server: each(func(*resourceapi.Device) {}), config: Without{Taints: true}, want: Without{Taints: true}},
		"1.34 with all that it has": {
			server: refusing(func(slice *resourceapi.ResourceSlice) bool { return effectless(slice) || apart(slice) || listed(slice) }),
			want:   Without{Lists: true, Groups: true, PartitionType: true, Told: true, Separate: true},
		},
		"1.34 as it comes": {
			server: func(slice *resourceapi.ResourceSlice) error {
				return errors.Join(withoutCounters(slice), each(func(d *resourceapi.Device) {
					d.Taints, d.AllowMultipleAllocations, d.NodeAllocatableResources = nil, nil, nil
				})(slice))
			},
			want: Without{Overhead: true, Groups: true, PartitionType: true, Taints: true, Told: true, Counters: true, Sharing: true},
		},
		"refuses counters anyhow": {
			server: refusing(func(slice *resourceapi.ResourceSlice) bool { return slices.ContainsFunc(slice.Spec.Devices, consumes) }),
			want:   Without{Counters: true, Groups: true, PartitionType: true},
		},
		"before taints without an effect": {server: refusing(effectless), want: Without{Told: true}},
		"does not answer":                 {server: func(*resourceapi.ResourceSlice) error { return errors.New("timeout") }},
		"fails when it is asked for one field": {
			server: func(slice *resourceapi.ResourceSlice) error {
				if len(slice.Spec.Devices) > 1 {
					return apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "", nil)
				}
				return errors.New("timeout")
			},
			config: Without{Sharing: true},
			want:   Without{Sharing: true},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.config.KubeClient, b.config.Without = dropping(t, test.server), test.config
			b.restart()
			b.negotiate(t.Context())
			if got := *b.without.Load(); got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

// A server that was upgraded is taken at its new word.
func TestNegotiateAgain(t *testing.T) {
	old := true
	b := newBench(t)
	b.config.KubeClient = dropping(t, func(slice *resourceapi.ResourceSlice) error {
		for i := range slice.Spec.Devices {
			if old {
				slice.Spec.Devices[i].Taints = nil
			}
		}
		return nil
	})
	b.restart()
	if features := b.Features(); features != nil {
		t.Errorf("said before the server was asked: %v", features)
	}
	b.negotiate(t.Context())
	if !b.without.Load().Taints || !slices.Contains(b.Features(), Feature{"DRADeviceTaints", false}) {
		t.Fatal("the old server's answer was not noticed")
	}
	old = false
	b.negotiate(t.Context())
	if *b.without.Load() != (Without{}) {
		t.Errorf("still without %+v", *b.without.Load())
	}
	for _, feature := range b.Features() {
		if !feature.Kept {
			t.Errorf("%s: not kept", feature.Name)
		}
	}
}

// While the API server is not there, or is unwell, claims are prepared and
// nothing is published. When it is there it is asked before.
func TestPublishingWaitsForTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := []error{syscall.ECONNREFUSED, apierrors.NewInternalError(errors.New("no etcd")), apierrors.NewTooManyRequests("later", 1)}
		var answers atomic.Int32
		b, helper := newBench(t), &fakeHelper{}
		b.config.KubeClient = dropping(t, func(slice *resourceapi.ResourceSlice) error {
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
		time.Sleep(negotiatePause)
		expectPublished(t, helper, "a") // the server has no taints
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// A driver that waits for the API server ends at once.
func TestRunEndsWhileItWaitsForTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.config.KubeClient = dropping(t, func(*resourceapi.ResourceSlice) error { return syscall.ECONNREFUSED })
		stop := b.run(&fakeHelper{})
		synctest.Wait()
		start := time.Now()
		if err := stop(); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took > 0 { // of the bubble's time
			t.Errorf("Run took %s to end", took)
		}
	})
}

// A server that does not say what it keeps is published to, and asked again
// before long.
func TestRefusalIsNotForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var allowed atomic.Bool
		b, helper := newBench(t), &fakeHelper{}
		b.config.KubeClient = dropping(t, func(slice *resourceapi.ResourceSlice) error {
			if !allowed.Load() {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "", errors.New("no roles yet"))
			}
			for i := range slice.Spec.Devices {
				slice.Spec.Devices[i].Taints = nil
			}
			return nil
		})
		stop := b.run(helper)
		sick := gpu("a", 1)
		sick.Health.Status = discovery.Unhealthy
		b.offers(sick)
		expectPublished(t, helper, "a!unhealthy:NoSchedule")
		allowed.Store(true)
		time.Sleep(2 * b.askInterval / sooner)
		expectPublished(t, helper, "")
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// A server that has begun to drop counters is asked before devices that compete
// are published for the first time, and not only when it is time to.
func TestCountersAreAskedForBeforeTheyAreNeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var drops atomic.Bool
		b, helper := newBench(t), &fakeHelper{}
		b.config.KubeClient = dropping(t, func(slice *resourceapi.ResourceSlice) error {
			if drops.Load() {
				return withoutCounters(slice)
			}
			return nil
		})
		stop := b.run(helper)
		b.offers(gpu("a", 1))
		expectPublished(t, helper, "a")
		drops.Store(true)
		b.offers(gpu("a", 1), part("g0", "g0", 7), part("g0", "g0-a", 3))
		expectPublished(t, helper, "a g0")
		drops.Store(false)
		b.offers(gpu("a", 1))
		expectPublished(t, helper, "a")
		if b.negotiate(t.Context()) != nil {
			t.Error("cannot be asked")
		}
		b.offers(gpu("a", 1), part("g0", "g0", 7), part("g0", "g0-a", 3))
		synctest.Wait()
		if diff := cmp.Diff([][]string{{"set:g0", "a g0<g0 g0-a<g0"}}, helper.sketches()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}
