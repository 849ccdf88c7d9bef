package publish

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// The slices that the library gets from the API server have the memory of the published devices if
// all devices of a slice are equal. The published devices have the memory of those that the library
// has written.
func TestSlicesShareThePublishedPool(t *testing.T) {
	device := func(name, kind string) resourceapi.Device {
		return resourceapi.Device{Name: name, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"kind": {StringValue: &kind}}}
	}
	slice := func(name string, devices ...resourceapi.Device) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceSliceSpec{Pool: resourceapi.ResourcePool{Name: "node"}, Devices: devices}}
	}
	server := fake.NewClientset(slice("equal", device("a", "gpu")), slice("other", device("b", "nic")))
	pools := &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{"node": {Slices: []resourceslice.Slice{{Devices: []resourceapi.Device{device("a", "gpu")}}, {Devices: []resourceapi.Device{device("b", "gpu")}}}}}}
	p := New(Config{NodeName: "node", NodeUID: nodeUIDOf(server), KubeClient: server})
	p.lastPools.Store(pools)
	library := p.KubeClient().ResourceV1().ResourceSlices()
	expect := func(by string, got *resourceapi.ResourceSlice, i int) {
		t.Helper()
		if shared := &got.Spec.Devices[0] == &p.lastPools.Load().Pools["node"].Slices[i].Devices[0]; shared != (got.Name == "equal") {
			t.Errorf("%s: slice %s has the published memory: %v", by, got.Name, shared)
		}
	}
	list, err := library.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		expect("list", &list.Items[i], i)
	}
	if *list.Items[1].Spec.Devices[0].Attributes["kind"].StringValue != "nic" {
		t.Error("a device of the API server was replaced by another device")
	}
	events, err := library.Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"equal", "other"} {
		written := list.Items[i].DeepCopy()
		updated, err := library.Update(t.Context(), written, metav1.UpdateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		expect("update of "+name, updated, i)
		expect("what was written by the update of "+name, written, i)
		event := <-events.ResultChan()
		for event.Type == watch.Added { // the watch begins with the existing slices, which it may have read before the update
			event = <-events.ResultChan()
		}
		expect("watch", event.Object.(*resourceapi.ResourceSlice), i)
	}
	events.Stop()
	for range events.ResultChan() { // closed after the last event
	}
	if err := library.Delete(t.Context(), "equal", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	written := slice("equal", device("a", "gpu"))
	created, err := library.Create(t.Context(), written, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	expect("create", created, 0)
	expect("what was created", written, 0)
	if &pools.Pools["node"].Slices[0].Devices[0] == &written.Spec.Devices[0] || len(p.wake) == 0 {
		t.Error("the pool was modified in place, or the loop is not woken")
	}
}
