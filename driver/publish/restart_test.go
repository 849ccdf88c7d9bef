package publish

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// library publishes with the controller of the DRA library, like [kubeletplugin.Helper].
type library struct {
	t          *testing.T
	client     kubernetes.Interface
	controller *resourceslice.Controller
}

func (l *library) PublishResources(ctx context.Context, resources resourceslice.DriverResources) (err error) {
	if l.controller != nil {
		l.controller.Update(&resources)
		return nil
	}
	l.controller, err = resourceslice.StartController(context.WithoutCancel(ctx), resourceslice.Options{
		DriverName: discovery.Domain, KubeClient: l.client, Resources: &resources,
		Owner:            &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: "node", UID: SetOnCreate},
		MutationCacheTTL: new(365 * 24 * time.Hour), // avoids endless work
		ErrorHandler:     func(_ context.Context, err error, msg string) { l.t.Errorf("%s: %v", msg, err) },
	})
	return err
}

// An agent that starts again with unchanged devices writes no slice: it divides the devices among the
// slices as they are published, although devices came and went before.
func TestRestartWritesNoSlices(t *testing.T) {
	for name, test := range map[string]struct {
		devices int
		pools   int
		removed int
		lists   int // of the node's slices, except the library's
	}{
		"several slices":            {136, 1, 1, 1},
		"several of each pool":      {300, 2, 1, 1},
		"one slice":                 {8, 1, 1, 0},
		"one slice instead of more": {60, 1, 10, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { restartOf(t, test.devices, test.pools, test.removed, test.lists) })
		})
	}
}

func restartOf(t *testing.T, count, pools, removed, wantedLists int) {
	server := newCollected(t)
	server.setNode("uid")
	var writes, lists atomic.Int32
	server.PrependReactor("*", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		switch action := action.(type) {
		case clienttesting.CreateActionImpl:
			if len(action.CreateOptions.DryRun) > 0 {
				return true, action.Object, nil
			}
			writes.Add(1)
		case clienttesting.UpdateActionImpl, clienttesting.DeleteActionImpl:
			writes.Add(1)
		case clienttesting.ListActionImpl:
			lists.Add(1)
		}
		return false, nil, nil
	})
	devices := make([]rules.Offered, count)
	for i := range devices {
		devices[i] = gpu(fmt.Sprintf("gpu-%03d", i))
		if i%pools == 1 {
			devices[i].Attributes = discovery.Attributes{}
			devices[i].Attributes.SetString("kind", "gpu")
		}
	}
	start := func(devices []rules.Offered) (b *bench, stop func()) {
		b = newBench(t, server)
		helper := &library{t: t, client: b.KubeClient()}
		end := b.run(helper)
		b.offers(devices...)
		time.Sleep(time.Hour)
		return b, func() {
			if err := end(); err != nil {
				t.Error(err)
			}
			helper.controller.Stop()
		}
	}
	b, stop := start(devices)
	devices = slices.Delete(slices.Clone(devices), count/2, count/2+removed)
	b.offers(devices...)
	time.Sleep(time.Hour)
	devices = slices.Insert(slices.Clone(devices), len(devices)-1, gpu("gpu-new"))
	b.offers(devices...)
	time.Sleep(time.Hour)
	stop()
	if n := writes.Swap(0); n < 3 {
		t.Fatalf("%d writes before the restart", n)
	}
	lists.Store(0)
	_, stop = start(devices)
	stop()
	if n := writes.Load(); n > 0 {
		t.Errorf("%d writes after the restart", n)
	}
	if n := int(lists.Load()) - 1; n != wantedLists {
		t.Errorf("%d lists of slices, want %d", n, wantedLists)
	}
	published := 0
	for _, slice := range server.slices() {
		published += len(slice.Spec.Devices)
	}
	if published != len(devices) {
		t.Errorf("%d devices are published, want %d", published, len(devices))
	}
}

var _ Helper = &library{}
