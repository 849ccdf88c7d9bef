// Package validation passes published ResourceSlices through the API server's own code, in this
// process and without a cluster. For any host and any feature gates, the server must refuse no
// slice and drop no field, except fields that the driver knows to be unsupported.
package validation

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
	resourceslicelib "k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install" // the conversions
	"k8s.io/kubernetes/pkg/registry/resource/resourceslice"

	"chandler.dev/driver/pool"
)

// admit runs the API server's code for the creation or update of a slice, with the feature gates of
// this process, and returns the stored slice. The code includes defaults, conversion, the
// strategy's removal of fields and both kinds of validation. If old is nil, the slice is created;
// otherwise it updates old.
func admit(slice, old *resourceapi.ResourceSlice) (*resourceapi.ResourceSlice, error) {
	ctx := genericapirequest.NewContext()
	ctx = genericapirequest.WithNamespace(ctx, "")
	ctx = genericapirequest.WithRequestInfo(ctx, &genericapirequest.RequestInfo{APIGroup: "resource.k8s.io", APIVersion: "v1", Resource: "resourceslices"})
	wanted, err := internal(slice)
	if err != nil {
		return nil, err
	}
	if old == nil {
		rest.FillObjectMetaSystemFields(wanted)
		if wanted.Name == "" {
			wanted.Name = resourceslice.Strategy.GenerateName(wanted.GenerateName)
		}
		err = rest.BeforeCreate(resourceslice.Strategy, ctx, wanted)
	} else {
		var stored *resource.ResourceSlice
		if stored, err = internal(old); err == nil {
			err = rest.BeforeUpdate(resourceslice.Strategy, ctx, wanted, stored)
		}
	}
	if err != nil {
		return nil, err
	}
	kept := &resourceapi.ResourceSlice{}
	if err := legacyscheme.Scheme.Convert(wanted, kept, nil); err != nil {
		return nil, fmt.Errorf("convert from the server's form: %w", err)
	}
	return kept, nil
}

// internal returns a copy of a slice in the server's internal form, with defaults.
func internal(slice *resourceapi.ResourceSlice) (*resource.ResourceSlice, error) {
	out := &resource.ResourceSlice{}
	if err := legacyscheme.Scheme.Convert(defaulted(slice), out, nil); err != nil {
		return nil, fmt.Errorf("convert to the server's form: %w", err)
	}
	return out, nil
}

// defaulted returns a copy of a slice with the server's defaults. A taint without a time gets the
// present time.
func defaulted(slice *resourceapi.ResourceSlice) *resourceapi.ResourceSlice {
	out := slice.DeepCopy()
	legacyscheme.Scheme.Default(out)
	return out
}

// server stores ResourceSlices like an API server.
type server struct {
	tracker clienttesting.ObjectTracker
	version int // of the last change
}

// newServer returns a server without slices, and a client for it.
func newServer() (*server, *fake.Clientset) {
	s := &server{tracker: clienttesting.NewObjectTracker(scheme.Scheme, scheme.Codecs.UniversalDecoder())}
	client := &fake.Clientset{}
	client.AddReactor("create", "resourceslices", s.write)
	client.AddReactor("update", "resourceslices", s.write)
	client.AddReactor("*", "*", clienttesting.ObjectReaction(s.tracker))
	client.AddWatchReactor("*", func(action clienttesting.Action) (bool, watch.Interface, error) {
		w, err := s.tracker.Watch(action.GetResource(), action.GetNamespace())
		return true, w, err
	})
	return s, client
}

// write creates or updates a slice.
func (s *server) write(action clienttesting.Action) (bool, runtime.Object, error) {
	create, creates := action.(clienttesting.CreateActionImpl)
	if creates {
		kept, err := admit(create.Object.(*resourceapi.ResourceSlice), nil)
		if err != nil || len(create.CreateOptions.DryRun) > 0 {
			return true, kept, err
		}
		return true, kept, s.tracker.Create(create.Resource, s.numbered(kept), "")
	}
	update := action.(clienttesting.UpdateActionImpl)
	slice := update.Object.(*resourceapi.ResourceSlice)
	old, err := s.tracker.Get(update.Resource, "", slice.Name)
	if err != nil {
		return true, nil, err
	}
	kept, err := admit(slice, old.(*resourceapi.ResourceSlice))
	if err != nil {
		return true, nil, err
	}
	return true, kept, s.tracker.Update(update.Resource, s.numbered(kept), "")
}

// numbered sets the slice's resource version, and returns the slice.
func (s *server) numbered(slice *resourceapi.ResourceSlice) *resourceapi.ResourceSlice {
	s.version++
	slice.ResourceVersion = fmt.Sprint(s.version)
	return slice
}

// compare expects the server to have exactly the slices of the pools, in the same order.
func (s *server) compare(t *testing.T, published resourceslicelib.DriverResources) {
	t.Helper()
	list, err := s.tracker.List(resourceapi.SchemeGroupVersion.WithResource("resourceslices"), resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"), "")
	if err != nil {
		t.Fatal(err)
	}
	items := list.(*resourceapi.ResourceSliceList).Items
	wanted := pool.SlicesOf(published)
	if len(items) != len(wanted) {
		t.Fatalf("%d slices, want %d", len(items), len(wanted))
	}
	slices.SortFunc(items, func(a, b resourceapi.ResourceSlice) int {
		return cmp.Or(strings.Compare(a.Spec.Pool.Name, b.Spec.Pool.Name), strings.Compare(a.Name, b.Name))
	})
	for i, slice := range items {
		want := wanted[i]
		if !resourceslicelib.DevicesDeepEqual(slice.Spec.Devices, want.Devices) || !equality.Semantic.DeepEqual(slice.Spec.SharedCounters, want.SharedCounters) {
			t.Errorf("slice %s is not as it was published", slice.Name)
		}
	}
}
