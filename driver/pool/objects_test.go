package pool_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/driver/pool"
)

// SliceObjects returns the objects that the library's controller writes to an empty server.
func TestObjectsAreTheController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		taken := resourceapi.CounterSet{Name: "gpu", Counters: map[string]resourceapi.Counter{}}
		main := resourceslice.Pool{Slices: []resourceslice.Slice{{SharedCounters: []resourceapi.CounterSet{taken}}}}
		for i := range 20 {
			main.Slices = append(main.Slices, resourceslice.Slice{Devices: []resourceapi.Device{{Name: "gpu-" + string(rune('a'+i))}}, PartitionTypeAttribute: new(resourceapi.FullyQualifiedName("chandler.dev/x"))})
		}
		other := resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: []resourceapi.Device{{Name: "kvm"}}}}}
		p := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{"node": main, "node/other": other}}
		client := fake.NewClientset()
		client.PrependReactor("create", "resourceslices", func(action kubetesting.Action) (bool, runtime.Object, error) {
			slice := action.(kubetesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
			slice.Name = strings.TrimSuffix(slice.GenerateName, "node-") + strings.ReplaceAll(slice.Spec.Pool.Name, "/", "-") // the API server adds five random characters
			return false, nil, nil
		})
		controller, err := resourceslice.StartController(t.Context(), resourceslice.Options{
			DriverName: discovery.Domain, KubeClient: client,
			Owner:     &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: "node", UID: "uid"},
			Resources: &p,
		})
		if err != nil {
			t.Fatal(err)
		}
		defer controller.Stop()
		time.Sleep(time.Minute)
		written, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		byName := make(map[string]resourceapi.ResourceSlice)
		for _, slice := range written.Items {
			byName[slice.Name] = slice
		}
		objects := pool.SliceObjects("node", p)
		if len(objects.Items) != len(written.Items) || len(byName) != len(written.Items) {
			t.Fatalf("%d objects, %d written", len(objects.Items), len(written.Items))
		}
		for _, object := range objects.Items {
			if want := byName[object.Name].Spec; !equality.Semantic.DeepEqual(want, object.Spec) {
				t.Errorf("%s: -written +object:\n%s", object.Name, cmp.Diff(want, object.Spec))
			}
		}
	})
}
