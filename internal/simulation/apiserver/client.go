package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
)

// Client returns a client of the server. Each request passes the gate first, which adds faults of
// this client only; the gate may be nil. The client implements the methods that the agent uses:
// other methods panic.
func (s *Server) Client(gate Fault) kubernetes.Interface { return client{server: s, gate: gate} }

type client struct {
	kubernetes.Interface
	server *Server
	gate   Fault
}

// IsWatchListSemanticsUnSupported makes caches list first, and watch afterwards.
func (client) IsWatchListSemanticsUnSupported() bool { return true }

// CoreV1 implements [kubernetes.Interface].
func (c client) CoreV1() coreclient.CoreV1Interface { return core{client: c} }

// EventsV1 implements [kubernetes.Interface].
func (c client) EventsV1() eventsclient.EventsV1Interface { return events{client: c} }

// ResourceV1 implements [kubernetes.Interface].
func (c client) ResourceV1() resourceclient.ResourceV1Interface { return resources{client: c} }

type core struct {
	coreclient.CoreV1Interface
	client client
}

func (c core) Nodes() coreclient.NodeInterface {
	return nodes{kind: kind[*corev1.Node, *corev1.NodeList]{c.client, "nodes", "", func(m metav1.ListMeta, all []*corev1.Node) *corev1.NodeList {
		return &corev1.NodeList{ListMeta: m, Items: values(all)}
	}}}
}

func (c core) Pods(namespace string) coreclient.PodInterface {
	return pods{kind: kind[*corev1.Pod, *corev1.PodList]{c.client, "pods", namespace, func(m metav1.ListMeta, all []*corev1.Pod) *corev1.PodList {
		return &corev1.PodList{ListMeta: m, Items: values(all)}
	}}}
}

type events struct {
	eventsclient.EventsV1Interface
	client client
}

func (c events) Events(namespace string) eventsclient.EventInterface {
	return eventsOf{kind: kind[*eventsv1.Event, *eventsv1.EventList]{client: c.client, resource: "events", namespace: namespace}}
}

type resources struct {
	resourceclient.ResourceV1Interface
	client client
}

func (c resources) ResourceSlices() resourceclient.ResourceSliceInterface {
	return slicesOf{kind: kind[*resourceapi.ResourceSlice, *resourceapi.ResourceSliceList]{c.client, "resourceslices", "", func(m metav1.ListMeta, all []*resourceapi.ResourceSlice) *resourceapi.ResourceSliceList {
		return &resourceapi.ResourceSliceList{ListMeta: m, Items: values(all)}
	}}}
}

func (c resources) ResourceClaims(namespace string) resourceclient.ResourceClaimInterface {
	return claimsOf{kind: kind[*resourceapi.ResourceClaim, *resourceapi.ResourceClaimList]{c.client, "resourceclaims", namespace, func(m metav1.ListMeta, all []*resourceapi.ResourceClaim) *resourceapi.ResourceClaimList {
		return &resourceapi.ResourceClaimList{ListMeta: m, Items: values(all)}
	}}}
}

func (c resources) DeviceClasses() resourceclient.DeviceClassInterface {
	return classesOf{kind: kind[*resourceapi.DeviceClass, *resourceapi.DeviceClassList]{c.client, "deviceclasses", "", func(m metav1.ListMeta, all []*resourceapi.DeviceClass) *resourceapi.DeviceClassList {
		return &resourceapi.DeviceClassList{ListMeta: m, Items: values(all)}
	}}}
}

// Each client has the methods of kind, and the other methods of its interface, which panic.
type (
	nodes struct {
		kind[*corev1.Node, *corev1.NodeList]
		restOfNodes
	}
	pods struct {
		kind[*corev1.Pod, *corev1.PodList]
		restOfPods
	}
	eventsOf struct {
		kind[*eventsv1.Event, *eventsv1.EventList]
		restOfEvents
	}
	slicesOf struct {
		kind[*resourceapi.ResourceSlice, *resourceapi.ResourceSliceList]
		restOfSlices
	}
	claimsOf struct {
		kind[*resourceapi.ResourceClaim, *resourceapi.ResourceClaimList]
		restOfClaims
	}
	classesOf struct {
		kind[*resourceapi.DeviceClass, *resourceapi.DeviceClassList]
		restOfClasses
	}

	restOfNodes  struct{ coreclient.NodeInterface }
	restOfPods   struct{ coreclient.PodInterface }
	restOfEvents struct{ eventsclient.EventInterface }
	restOfSlices struct {
		resourceclient.ResourceSliceInterface
	}
	restOfClaims struct {
		resourceclient.ResourceClaimInterface
	}
	restOfClasses struct {
		resourceclient.DeviceClassInterface
	}
)

// kind is a client for one kind in one namespace.
type kind[T object, L any] struct {
	client    client
	resource  string
	namespace string
	listOf    func(metav1.ListMeta, []T) L
}

// begin admits a request and locks the server.
func (k kind[T, L]) begin(ctx context.Context, call Call) (*store, error) {
	call.Resource = k.resource
	if err := k.client.server.admitRequest(ctx, k.client.gate, call); err != nil {
		return nil, err
	}
	k.client.server.mu.Lock()
	return k.client.server.stores[k.resource], nil
}

func (k kind[T, L]) end() { k.client.server.mu.Unlock() }

// answer reports an answer to the observer of the server. The size is that of the object in
// protobuf, which the agent requests, without the headers of HTTP.
func (k kind[T, L]) answer(call Call, o any) {
	call.Resource = k.resource
	sized, is := o.(interface{ Size() int })
	if observe := k.client.server.observe; observe != nil && k.client.gate != nil && is {
		observe(call, sized.Size())
	}
}

// Get returns an object.
func (k kind[T, L]) Get(ctx context.Context, name string, _ metav1.GetOptions) (none T, err error) {
	s, err := k.begin(ctx, Call{Verb: "get"})
	if err != nil {
		return none, err
	}
	defer k.end()
	o := s.objects[k.namespace+"/"+name]
	if o == nil {
		return none, apierrors.NewNotFound(s.resource, name)
	}
	k.answer(Call{Verb: "get"}, o)
	return o.DeepCopyObject().(T), nil
}

// Watch reports the events after the version in the options.
func (k kind[T, L]) Watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	selector, err := fields.ParseSelector(options.FieldSelector)
	if err != nil {
		return nil, err
	}
	s, err := k.begin(ctx, Call{Verb: "watch", Selector: options.FieldSelector})
	if err != nil {
		return nil, err
	}
	defer k.end()
	w := &watcher{
		store: s, server: k.client.server, namespace: k.namespace, selector: selector,
		more: make(chan struct{}, 1), result: make(chan watch.Event), stop: make(chan struct{}),
	}
	k.answer(Call{Verb: "watch", Selector: options.FieldSelector}, &metav1.WatchEvent{})
	from, _ := strconv.ParseInt(options.ResourceVersion, 10, 64)
	for _, e := range s.events {
		if e.version > from {
			w.tell(e)
		}
	}
	s.watchers[w] = true
	go w.run()
	if ctx.Done() != nil {
		context.AfterFunc(ctx, w.Stop)
	}
	return w, nil
}

// List returns the selected objects and their version.
func (k kind[T, L]) List(ctx context.Context, options metav1.ListOptions) (none L, err error) {
	s, err := k.begin(ctx, Call{Verb: "list", Selector: options.FieldSelector})
	if err != nil {
		return none, err
	}
	defer k.end()
	objects, at := s.objects, k.client.server.version
	if stale := k.client.server.stale; stale > 0 && options.ResourceVersion == "0" {
		objects, at = s.at(stale), stale
	}
	all, err := s.listObjects(k.namespace, options, objects)
	if err != nil {
		return none, err
	}
	found := make([]T, 0, len(all))
	for _, o := range all {
		found = append(found, o.(T))
	}
	list := k.listOf(metav1.ListMeta{ResourceVersion: strconv.FormatInt(at, 10)}, found)
	k.answer(Call{Verb: "list", Selector: options.FieldSelector}, list)
	return list, nil
}

// Create creates an object.
func (k kind[T, L]) Create(ctx context.Context, o T, options metav1.CreateOptions) (none T, err error) {
	dry := len(options.DryRun) > 0
	s, err := k.begin(ctx, Call{Verb: "create", DryRun: dry})
	if err != nil {
		return none, err
	}
	defer k.end()
	made := o.DeepCopyObject().(T)
	if k.namespace != "" {
		made.SetNamespace(k.namespace)
	}
	k.client.server.setCreated(made)
	if s.objects[keyOf(made)] != nil {
		return none, apierrors.NewAlreadyExists(s.resource, made.GetName())
	}
	if err := k.client.server.keepFields(made, nil); err != nil {
		return none, err
	}
	if !dry {
		k.client.server.Writes++
		s.changeObject(watch.Added, made, k.client.server.next())
	}
	k.answer(Call{Verb: "create", DryRun: dry}, made)
	return made.DeepCopyObject().(T), nil
}

// Update replaces an object, if the version is current.
func (k kind[T, L]) Update(ctx context.Context, o T, _ metav1.UpdateOptions) (none T, err error) {
	s, err := k.begin(ctx, Call{Verb: "update"})
	if err != nil {
		return none, err
	}
	defer k.end()
	before := s.objects[keyOf(o)]
	switch {
	case before == nil:
		return none, apierrors.NewNotFound(s.resource, o.GetName())
	case o.GetResourceVersion() != "" && o.GetResourceVersion() != before.GetResourceVersion(), o.GetUID() != "" && o.GetUID() != before.GetUID():
		return none, apierrors.NewConflict(s.resource, o.GetName(), errors.New("the object has been modified"))
	}
	made := o.DeepCopyObject().(T)
	made.SetUID(before.GetUID())
	made.SetCreationTimestamp(before.GetCreationTimestamp())
	made.SetGeneration(before.GetGeneration() + 1)
	if err := k.client.server.keepFields(made, before); err != nil {
		return none, err
	}
	k.client.server.Writes++
	s.changeObject(watch.Modified, made, k.client.server.next())
	k.answer(Call{Verb: "update"}, made)
	return made.DeepCopyObject().(T), nil
}

// Delete removes an object, if the options match.
func (k kind[T, L]) Delete(ctx context.Context, name string, options metav1.DeleteOptions) error {
	s, err := k.begin(ctx, Call{Verb: "delete"})
	if err != nil {
		return err
	}
	defer k.end()
	o := s.objects[k.namespace+"/"+name]
	if o == nil {
		return apierrors.NewNotFound(s.resource, name)
	}
	if p := options.Preconditions; p != nil {
		if p.UID != nil && *p.UID != o.GetUID() || p.ResourceVersion != nil && *p.ResourceVersion != o.GetResourceVersion() {
			return apierrors.NewConflict(s.resource, name, errors.New("the precondition does not hold"))
		}
	}
	k.client.server.Writes++
	k.client.server.delete(s, o)
	k.answer(Call{Verb: "delete"}, &metav1.WatchEvent{})
	return nil
}

// ApplyStatus sets the status of a claim's devices. The model has only one field manager, so fields
// left out are removed.
func (k claimsOf) ApplyStatus(ctx context.Context, c *resourceapply.ResourceClaimApplyConfiguration, _ metav1.ApplyOptions) (*resourceapi.ResourceClaim, error) {
	s, err := k.begin(ctx, Call{Verb: "apply"})
	if err != nil {
		return nil, err
	}
	defer k.end()
	before, is := s.objects[k.namespace+"/"+*c.Name].(*resourceapi.ResourceClaim)
	if !is || c.UID != nil && *c.UID != before.UID {
		return nil, apierrors.NewNotFound(s.resource, *c.Name)
	}
	var said resourceapi.ResourceClaim
	data, err := json.Marshal(c)
	if err == nil {
		err = json.Unmarshal(data, &said)
	}
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	made := before.DeepCopy()
	made.Status.Devices = said.Status.Devices
	k.client.server.Writes++
	s.changeObject(watch.Modified, made, k.client.server.next())
	k.answer(Call{Verb: "apply"}, made)
	return made.DeepCopy(), nil
}

// sorted returns the objects sorted by name.
func sorted(objects map[string]object) (all []object) {
	for _, key := range slices.Sorted(maps.Keys(objects)) {
		all = append(all, objects[key])
	}
	return all
}

// presentObjects returns all objects of a kind.
func presentObjects[T object](s *Server, resource string) (all []T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range sorted(s.stores[resource].objects) {
		all = append(all, o.(T))
	}
	return all
}

// values dereferences pointers.
func values[T any](pointers []*T) []T {
	all := make([]T, 0, len(pointers))
	for _, p := range pointers {
		all = append(all, *p)
	}
	return all
}
