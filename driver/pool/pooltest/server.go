package pooltest

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"chandler.dev/discovery"
)

// ChangingServer returns a client of an API server. The server passes the slice of each create call
// to change, which may modify the slice or refuse the call with an error.
func ChangingServer(t testing.TB, change func(*resourceapi.ResourceSlice) error) *fake.Clientset {
	client := fake.NewClientset()
	client.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		create := action.(clienttesting.CreateActionImpl)
		if len(create.CreateOptions.DryRun) == 0 {
			t.Error("a slice is created in earnest")
		}
		slice := create.Object.(*resourceapi.ResourceSlice).DeepCopy()
		if slice.Spec.Driver != "chandler.dev" || !discovery.IsPoolOf("node", slice.Spec.Pool.Name) || *slice.Spec.NodeName != "node" {
			t.Errorf("an admission policy would not let this pass: %v", slice.Spec)
		}
		return true, slice, change(slice)
	})
	return client
}

// KeepingServer returns a client of an API server without changes to slices.
func KeepingServer(t testing.TB) *fake.Clientset {
	return ChangingServer(t, func(*resourceapi.ResourceSlice) error { return nil })
}

// WithoutCounters removes from a slice the fields dropped by a server without counters.
func WithoutCounters(slice *resourceapi.ResourceSlice) error {
	slice.Spec.SharedCounters, slice.Spec.PartitionTypeAttribute = nil, nil
	for i := range slice.Spec.Devices {
		slice.Spec.Devices[i].ConsumesCounters = nil
	}
	return nil
}
