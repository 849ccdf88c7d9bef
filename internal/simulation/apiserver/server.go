// Package apiserver is a model of the API server for simulations: the kinds that the agent uses, in
// memory, with versions, conflicts, watches, stale lists and dry runs, and with faults of every
// kind that the agent must survive. It also models the server's controllers: it collects the slices
// of a deleted node. The package is not part of the product.
package apiserver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// Call is a request, as faults see it.
type Call struct {
	Verb     string // "get", "list", "watch", "create", "update", "delete", "apply"
	Resource string // "resourceslices"
	Selector string // the field selector of a list or watch
	DryRun   bool
}

// String returns a description of the call.
func (c Call) String() string {
	if c.DryRun {
		return c.Verb + " " + c.Resource + " in a dry run"
	}
	return c.Verb + " " + c.Resource
}

// ListsCluster reports whether a list or watch concerns more than a node: its answer has objects of
// other nodes too. DeviceClasses belong to no node.
func (c Call) ListsCluster(node string) bool {
	if c.Verb != "list" && c.Verb != "watch" || c.Resource == classesResource.Resource {
		return false
	}
	selector, err := fields.ParseSelector(c.Selector)
	if err != nil {
		return true
	}
	for _, field := range []string{"metadata.name", resourceapi.ResourceSliceSelectorNodeName, "status.nominatedNodeName"} {
		if value, exact := selector.RequiresExactMatch(field); exact && value == node {
			return false
		}
	}
	return true
}

// Fault is called for each request before the answer. It may wait. A non-nil result is the answer.
type Fault func(ctx context.Context, call Call) error

// Features are the optional fields of slices that the server keeps.
type Features struct {
	Taints, Counters, Separate, Sharing, Lists, Overhead, Groups, Types, Bindings, NoneEffect bool
}

// AllFeatures are the features of a server that keeps all fields.
var AllFeatures = Features{true, true, true, true, true, true, true, true, true, true}

// Server is a model of an API server. Its zero value is invalid; see [New].
type Server struct {
	mu       sync.Mutex
	version  int64
	created  int64
	fault    Fault
	features Features
	changed  time.Time // the last change of the features by ChangeFeatures
	stale    int64     // version of lists that may be stale, 0 for the present version
	noDRA    bool      // resource.k8s.io is not served
	observe  func(Call, int)

	stores map[string]*store
	Writes int // number of requests with a change
}

// The kinds of a server.
var (
	slicesResource  = schema.GroupResource{Group: resourceapi.GroupName, Resource: "resourceslices"}
	claimsResource  = schema.GroupResource{Group: resourceapi.GroupName, Resource: "resourceclaims"}
	classesResource = schema.GroupResource{Group: resourceapi.GroupName, Resource: "deviceclasses"}
	nodesResource   = schema.GroupResource{Resource: "nodes"}
	podsResource    = schema.GroupResource{Resource: "pods"}
	eventsResource  = schema.GroupResource{Group: eventsv1.GroupName, Resource: "events"}
)

// New returns a server without objects that keeps all fields.
func New() *Server {
	byName := func(o object) fields.Set { return fields.Set{"metadata.name": o.GetName()} }
	s := &Server{features: AllFeatures, stores: make(map[string]*store)}
	for resource, selects := range map[schema.GroupResource]func(object) fields.Set{
		slicesResource: func(o object) fields.Set {
			spec := o.(*resourceapi.ResourceSlice).Spec
			node := ""
			if spec.NodeName != nil {
				node = *spec.NodeName
			}
			return fields.Set{"metadata.name": o.GetName(), resourceapi.ResourceSliceSelectorDriver: spec.Driver, resourceapi.ResourceSliceSelectorNodeName: node}
		},
		claimsResource:  byName,
		classesResource: byName,
		nodesResource:   byName,
		podsResource: func(o object) fields.Set {
			pod := o.(*corev1.Pod)
			return fields.Set{"metadata.name": o.GetName(), "spec.nodeName": pod.Spec.NodeName, "status.nominatedNodeName": pod.Status.NominatedNodeName}
		},
		eventsResource: byName,
	} {
		s.stores[resource.Resource] = newStore(resource, selects)
	}
	return s
}

// SetFault sets the fault for each request from now on; nil removes the fault.
func (s *Server) SetFault(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// SetObserver sets the function that receives the answered requests of clients with a gate, and the
// sizes of the answers in bytes. The events of watches are left out. The function must not call the
// server.
func (s *Server) SetObserver(observe func(call Call, size int)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observe = observe
}

// SetFeatures sets the features of a new server.
func (s *Server) SetFeatures(f Features) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.features = f
	s.next() // schedulers try again
}

// ChangeFeatures changes the features, like an upgrade of the server. The objects stay unchanged.
func (s *Server) ChangeFeatures(f Features) {
	if f != s.Features() {
		s.mu.Lock()
		s.changed = time.Now()
		s.mu.Unlock()
	}
	s.SetFeatures(f)
}

// FeaturesChanged returns the time when ChangeFeatures last changed the features.
func (s *Server) FeaturesChanged() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Features returns the features of the server.
func (s *Server) Features() Features {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.features
}

// Version returns the version of the last change of any object.
func (s *Server) Version() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version
}

// Serve sets whether the server serves the group resource.k8s.io.
func (s *Server) Serve(dra bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noDRA = !dra
}

// FreezeLists makes lists that may be stale return the present state, until ThawLists: lists with
// resource version "0", as caches request them.
func (s *Server) FreezeLists() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stale = max(s.version, 1)
}

// ThawLists ends FreezeLists.
func (s *Server) ThawLists() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stale = 0
}

// EndWatches ends all watches, like a restart of the server.
func (s *Server) EndWatches() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, store := range s.stores {
		for w := range store.watchers {
			w.end()
		}
	}
}

// Slices returns all slices. The caller must not modify them.
func (s *Server) Slices() []*resourceapi.ResourceSlice {
	return presentObjects[*resourceapi.ResourceSlice](s, "resourceslices")
}

// Claims returns all claims. The caller must not modify them.
func (s *Server) Claims() []*resourceapi.ResourceClaim {
	return presentObjects[*resourceapi.ResourceClaim](s, "resourceclaims")
}

// Claim returns a claim, or nil. The caller must not modify the claim.
func (s *Server) Claim(namespace, name string) *resourceapi.ResourceClaim {
	s.mu.Lock()
	defer s.mu.Unlock()
	claim, _ := s.stores["resourceclaims"].objects[namespace+"/"+name].(*resourceapi.ResourceClaim)
	return claim
}

// PastSlices returns the slices before a number of changes of any object, as a scheduler with an
// outdated cache sees them. The slices are at most as old as the given age.
func (s *Server) PastSlices(changes int64, age time.Duration) []*resourceapi.ResourceSlice {
	s.mu.Lock()
	defer s.mu.Unlock()
	then := s.stores["resourceslices"].objects
	if changes > 0 {
		then = s.stores["resourceslices"].at(max(s.version-changes, s.stores["resourceslices"].versionBefore(time.Now().Add(-age)), 1))
	}
	var all []*resourceapi.ResourceSlice
	for _, o := range sorted(then) {
		all = append(all, o.(*resourceapi.ResourceSlice))
	}
	return all
}

// Put creates or replaces an object, for the model itself.
func (s *Server) Put(o object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	store := s.storeOf(o)
	before := store.objects[keyOf(o)]
	kind := watch.Added
	switch {
	case before != nil:
		kind = watch.Modified
		o.SetUID(before.GetUID())
		o.SetCreationTimestamp(before.GetCreationTimestamp())
	default:
		s.setCreated(o)
	}
	store.changeObject(kind, o, s.next())
}

// Delete removes an object, for the model itself. With a node, the node's objects are removed too.
func (s *Server) Delete(o object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delete(s.storeOf(o), o)
}

func (s *Server) delete(store *store, o object) {
	now := store.objects[keyOf(o)]
	if now == nil {
		return
	}
	gone := now.DeepCopyObject().(object)
	store.changeObject(watch.Deleted, gone, s.next())
	if node, is := gone.(*corev1.Node); is {
		s.collect(node.UID)
	}
}

// collect removes the slices of a deleted owner.
func (s *Server) collect(owner types.UID) {
	slices := s.stores["resourceslices"]
	for _, o := range sorted(slices.objects) {
		for _, reference := range o.GetOwnerReferences() {
			if reference.UID == owner {
				s.delete(slices, o)
				break
			}
		}
	}
}

// DeleteSlices removes all slices of a node, as a kubelet does at its start
// (pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go, wipeResourceSlices).
func (s *Server) DeleteSlices(node string) (deleted int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices := s.stores["resourceslices"]
	for _, o := range sorted(slices.objects) {
		if name := o.(*resourceapi.ResourceSlice).Spec.NodeName; name != nil && *name == node {
			s.delete(slices, o)
			deleted++
		}
	}
	return deleted
}

// setCreated sets the fields of a new object that the server sets.
func (s *Server) setCreated(o object) {
	s.created++
	if o.GetName() == "" {
		o.SetName(o.GetGenerateName() + fmt.Sprintf("%05d", s.created))
	}
	if o.GetUID() == "" {
		o.SetUID(newUID(s.created))
	}
	o.SetCreationTimestamp(metav1.Now())
	o.SetGeneration(1)
}

func (s *Server) next() int64 {
	s.version++
	return s.version
}

func (s *Server) storeOf(o object) *store {
	switch o.(type) {
	case *resourceapi.ResourceSlice:
		return s.stores["resourceslices"]
	case *resourceapi.ResourceClaim:
		return s.stores["resourceclaims"]
	case *resourceapi.DeviceClass:
		return s.stores["deviceclasses"]
	case *corev1.Node:
		return s.stores["nodes"]
	case *corev1.Pod:
		return s.stores["pods"]
	case *eventsv1.Event:
		return s.stores["events"]
	}
	panic(fmt.Sprintf("no store for %T", o))
}

// admitRequest waits for as long as the faults require, and returns the error of a failed request.
func (s *Server) admitRequest(ctx context.Context, gate Fault, call Call) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	fault, noDRA := s.fault, s.noDRA
	s.mu.Unlock()
	for _, f := range []Fault{gate, fault} {
		if f != nil {
			if err := f(ctx, call); err != nil {
				return err
			}
		}
	}
	if noDRA && (call.Resource == "resourceslices" || call.Resource == "resourceclaims" || call.Resource == "deviceclasses") {
		return apierrors.NewGenericServerResponse(404, call.Verb, schema.GroupResource{Group: resourceapi.GroupName, Resource: call.Resource}, "", "the server could not find the requested resource", 0, true)
	}
	return nil
}

// ErrDown is the error of requests while no server answers.
var ErrDown = errors.New("dial tcp: connect: connection refused")

// TooMany is the answer of an overloaded server.
func TooMany() error { return apierrors.NewTooManyRequests("too many requests", 1) }

// InternalError is the answer of a server with an internal error.
func InternalError() error {
	return apierrors.NewInternalError(errors.New("etcdserver: request timed out"))
}

// ForbiddenError is the answer of a server that lacks the access rules.
func ForbiddenError(resource string) error {
	return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no rule allows it"))
}

// ServedVersions returns the served versions of resource.k8s.io.
func (s *Server) ServedVersions(ctx context.Context, gate Fault) ([]string, error) {
	if err := s.admitRequest(ctx, gate, Call{Verb: "get", Resource: "groups"}); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.noDRA {
		return nil, nil
	}
	return []string{"v1"}, nil
}
