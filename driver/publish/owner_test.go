package publish

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
)

var (
	nodesResource  = corev1.SchemeGroupVersion.WithResource("nodes")
	slicesResource = resourceapi.SchemeGroupVersion.WithResource("resourceslices")
)

// nodeUIDOf returns a function that reads the UID of the Node.
func nodeUIDOf(client kubernetes.Interface) func(context.Context) (types.UID, error) {
	return func(ctx context.Context) (types.UID, error) {
		node, err := client.CoreV1().Nodes().Get(ctx, "node", metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		return node.UID, nil
	}
}

// collected is an API server with a garbage collector. Like the controller manager, it always
// removes slices whose owner UID differs from the UID of the Node (attemptToDeleteItem in
// pkg/controller/garbagecollector/garbagecollector.go of 1.34 and 1.37).
type collected struct {
	*fake.Clientset
	t       *testing.T
	created int
}

func newCollected(t *testing.T) *collected {
	c := &collected{Clientset: fake.NewClientset(), t: t}
	c.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		slice := action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		c.created++
		slice.Name, slice.UID, slice.ResourceVersion = fmt.Sprint(slice.GenerateName, c.created), types.UID(fmt.Sprint(c.created)), fmt.Sprint(c.created)
		return false, nil, nil
	})
	return c
}

// setNode replaces the Node by one with the UID. "" removes the Node.
func (c *collected) setNode(uid types.UID) {
	c.t.Helper()
	_ = c.Tracker().Delete(nodesResource, "", "node") // the Node may not exist
	if uid == "" {
		return
	}
	if err := c.Tracker().Create(nodesResource, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: uid}}, ""); err != nil {
		c.t.Fatal(err)
	}
}

func (c *collected) slices() []resourceapi.ResourceSlice {
	list, err := c.Tracker().List(slicesResource, resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"), "")
	if err != nil {
		c.t.Fatal(err)
	}
	return list.(*resourceapi.ResourceSliceList).Items
}

// collect removes the slices without an owner, every second.
func (c *collected) collect(ctx context.Context) {
	for ctx.Err() == nil {
		var uid types.UID
		if node, err := c.Tracker().Get(nodesResource, "", "node"); err == nil {
			uid = node.(*corev1.Node).UID
		}
		for _, slice := range c.slices() {
			if slice.OwnerReferences[0].UID != uid {
				if err := c.Tracker().Delete(slicesResource, "", slice.Name); err != nil {
					c.t.Error(err)
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// After a Node was deleted and created again, the slices belong to the new Node. They are created
// once, and then the driver makes no further calls.
func TestNodeCreatedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newCollected(t)
		server.setNode("uid-1")
		publisher := New(Config{NodeName: "node", NodeUID: nodeUIDOf(server), KubeClient: server})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		resources := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{"node": {Slices: []resourceslice.Slice{
			{Devices: []resourceapi.Device{{Name: "a"}}}, {Devices: []resourceapi.Device{{Name: "b"}}},
		}}}}
		controller, err := resourceslice.StartController(ctx, resourceslice.Options{
			DriverName: discovery.Domain, KubeClient: publisher.KubeClient(), Resources: &resources,
			Owner:            &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: "node", UID: "uid-1"}, // as stored by the library
			MutationCacheTTL: new(365 * 24 * time.Hour),                                                        // avoids endless work
			ErrorHandler:     func(_ context.Context, err error, msg string) { t.Logf("%s: %v", msg, err) },
		})
		if err != nil {
			t.Fatal(err)
		}
		defer controller.Stop()
		go server.collect(ctx)
		time.Sleep(time.Minute)
		expectOwned(t, server, "uid-1")
		server.setNode("")
		time.Sleep(time.Minute)
		if n := len(server.slices()); n > 0 {
			t.Errorf("%d slices of a Node that is not there", n)
		}
		server.setNode("uid-2")
		controller.Update(&resources) // as after the kubelet's registration
		time.Sleep(time.Minute)
		expectOwned(t, server, "uid-2")
		server.ClearActions()
		time.Sleep(time.Hour)
		expectOwned(t, server, "uid-2")
		for _, action := range server.Actions() {
			t.Errorf("at rest: %s %s", action.GetVerb(), action.GetResource().Resource)
		}
	})
}

func expectOwned(t *testing.T, server *collected, uid types.UID) {
	t.Helper()
	slices := server.slices()
	if len(slices) != 2 {
		t.Errorf("%d slices, want 2", len(slices))
	}
	for _, slice := range slices {
		if got := slice.OwnerReferences[0].UID; got != uid {
			t.Errorf("the slice %s is owned by %s, want %s", slice.Name, got, uid)
		}
	}
}
