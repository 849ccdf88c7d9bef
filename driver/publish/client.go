package publish

import (
	"context"
	"io"
	"maps"
	"net/http"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/util/watchlist"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// client is the client for the library. It creates ResourceSlices with the present UID of their
// Node. Equal devices are in memory once: the library has a copy of the pools that were published, and
// keeps the slices of the API server in two caches.
type client struct {
	kubernetes.Interface
	publisher *Publisher
}

// KubeClient returns the client for the library.
func (p *Publisher) KubeClient() kubernetes.Interface { return client{p.config.KubeClient, p} }

// ResourceV1 returns the client of the API group.
func (c client) ResourceV1() resourceclient.ResourceV1Interface {
	return resources{c.Interface.ResourceV1(), c.publisher}
}

// IsWatchListSemanticsUnSupported returns the answer of the wrapped client, which the library would
// not see otherwise. Only test clients return true; see
// [watchlist.DoesClientNotSupportWatchListSemantics].
func (c client) IsWatchListSemanticsUnSupported() bool {
	return watchlist.DoesClientNotSupportWatchListSemantics(c.Interface)
}

type resources struct {
	resourceclient.ResourceV1Interface
	publisher *Publisher
}

func (r resources) ResourceSlices() resourceclient.ResourceSliceInterface {
	return nodeSlices{r.ResourceV1Interface.ResourceSlices(), r.publisher}
}

// nodeSlices creates slices with the present UID of their Node, and returns slices that share the
// memory of the published pools.
type nodeSlices struct {
	resourceclient.ResourceSliceInterface
	publisher *Publisher
}

// Create creates a slice. It implements [resourceclient.ResourceSliceInterface].
func (s nodeSlices) Create(ctx context.Context, slice *resourceapi.ResourceSlice, options metav1.CreateOptions) (*resourceapi.ResourceSlice, error) {
	owned, err := s.publisher.own(ctx, slice)
	if err != nil {
		return nil, err
	}
	s.publisher.adoptDevices(slice) // before the watch has the event
	created, err := s.ResourceSliceInterface.Create(ctx, owned, options)
	return s.publisher.shared(created), err
}

// Update updates a slice. It implements [resourceclient.ResourceSliceInterface].
func (s nodeSlices) Update(ctx context.Context, slice *resourceapi.ResourceSlice, options metav1.UpdateOptions) (*resourceapi.ResourceSlice, error) {
	s.publisher.adoptDevices(slice) // before the watch has the event
	updated, err := s.ResourceSliceInterface.Update(ctx, slice, options)
	return s.publisher.shared(updated), err
}

// List lists slices. It implements [resourceclient.ResourceSliceInterface].
func (s nodeSlices) List(ctx context.Context, options metav1.ListOptions) (*resourceapi.ResourceSliceList, error) {
	list, err := s.ResourceSliceInterface.List(ctx, options)
	if err != nil {
		return nil, err
	}
	for i := range list.Items {
		list.Items[i] = *s.publisher.shared(&list.Items[i])
	}
	return list, nil
}

// Watch watches slices. It implements [resourceclient.ResourceSliceInterface].
func (s nodeSlices) Watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	events, err := s.ResourceSliceInterface.Watch(ctx, options)
	if err != nil {
		return nil, err
	}
	return watch.NewStreamWatcher(sharedEvents{events, s.publisher}, apierrors.NewClientErrorReporter(http.StatusInternalServerError, "WATCH", "")), nil
}

// sharedEvents are the events of a watch whose slices share the memory of the published pools.
type sharedEvents struct {
	events    watch.Interface
	publisher *Publisher
}

// Decode returns the next event. It implements [watch.Decoder].
func (s sharedEvents) Decode() (watch.EventType, runtime.Object, error) {
	event, ok := <-s.events.ResultChan()
	if !ok {
		return "", nil, io.EOF
	}
	if slice, is := event.Object.(*resourceapi.ResourceSlice); is {
		event.Object = s.publisher.shared(slice)
	}
	return event.Type, event.Object, nil
}

// Close ends the watch. It implements [watch.Decoder].
func (s sharedEvents) Close() { s.events.Stop() }

// shared returns the slice with the devices of a published slice if all of them are equal. Neither
// the library nor the publisher modifies the devices.
func (p *Publisher) shared(slice *resourceapi.ResourceSlice) *resourceapi.ResourceSlice {
	last := p.lastPools.Load()
	if last == nil || slice == nil {
		return slice
	}
	pool := last.Pools[slice.Spec.Pool.Name]
	if i := indexOfSlice(pool, slice.Spec.Devices); i >= 0 {
		same := *slice
		same.Spec.Devices = pool.Slices[i].Devices
		return &same
	}
	return slice
}

// adoptDevices replaces the devices of an equal published slice by the devices that the library
// writes, which are in the library's copy of the pools.
func (p *Publisher) adoptDevices(written *resourceapi.ResourceSlice) {
	last := p.lastPools.Load()
	if last == nil {
		return
	}
	pool := last.Pools[written.Spec.Pool.Name]
	if i := indexOfSlice(pool, written.Spec.Devices); i >= 0 {
		pool.Slices = slices.Clone(pool.Slices)
		pool.Slices[i].Devices = written.Spec.Devices
		adopted := &resourceslice.DriverResources{Pools: maps.Clone(last.Pools)}
		adopted.Pools[written.Spec.Pool.Name] = pool
		if p.lastPools.CompareAndSwap(last, adopted) { // the loop may have stored other pools
			p.NoteChange()
		}
	}
}

// indexOfSlice returns the index of the pool's slice with equal devices, or -1.
func indexOfSlice(pool resourceslice.Pool, devices []resourceapi.Device) int {
	return slices.IndexFunc(pool.Slices, func(s resourceslice.Slice) bool {
		return len(s.Devices) > 0 && equality.Semantic.DeepEqual(s.Devices, devices)
	})
}
