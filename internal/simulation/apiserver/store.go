package apiserver

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// object is an API object of any kind.
type object interface {
	runtime.Object
	metav1.Object
}

// store holds all objects of one kind with their history. The caller holds the server's lock.
// Stored objects are never modified.
type store struct {
	resource schema.GroupResource
	selects  func(object) fields.Set

	objects  map[string]object // by namespace/name
	events   []event           // complete history
	watchers map[*watcher]bool
}

// event is one change, at a resource version.
type event struct {
	version int64
	at      time.Time
	kind    watch.EventType
	object  object
}

func newStore(resource schema.GroupResource, selects func(object) fields.Set) *store {
	return &store{resource: resource, selects: selects, objects: make(map[string]object), watchers: make(map[*watcher]bool)}
}

func keyOf(o object) string { return o.GetNamespace() + "/" + o.GetName() }

// at returns the objects at a version.
func (s *store) at(version int64) map[string]object {
	then := make(map[string]object)
	for _, e := range s.events {
		switch {
		case e.version > version:
			return then
		case e.kind == watch.Deleted:
			delete(then, keyOf(e.object))
		default:
			then[keyOf(e.object)] = e.object
		}
	}
	return then
}

// versionBefore returns the version of the last change before a time, or 0.
func (s *store) versionBefore(when time.Time) (version int64) {
	for _, e := range slices.Backward(s.events) {
		if e.at.Before(when) {
			return e.version
		}
	}
	return 0
}

// listObjects returns copies of the selected objects, sorted by name.
func (s *store) listObjects(namespace string, options metav1.ListOptions, objects map[string]object) ([]object, error) {
	selector, err := fields.ParseSelector(options.FieldSelector)
	if err != nil {
		return nil, err
	}
	var found []object
	for _, key := range slices.Sorted(maps.Keys(objects)) {
		if o := objects[key]; s.matchesSelector(o, namespace, selector) {
			found = append(found, o.DeepCopyObject().(object))
		}
	}
	return found, nil
}

func (s *store) matchesSelector(o object, namespace string, selector fields.Selector) bool {
	if namespace != "" && o.GetNamespace() != namespace {
		return false
	}
	return selector.Empty() || selector.Matches(s.selects(o))
}

// changeObject stores o under its name, at a version, and notifies watchers.
func (s *store) changeObject(kind watch.EventType, o object, version int64) {
	o.SetResourceVersion(strconv.FormatInt(version, 10))
	if kind == watch.Deleted {
		delete(s.objects, keyOf(o))
	} else {
		s.objects[keyOf(o)] = o
	}
	e := event{version, time.Now(), kind, o}
	s.events = append(s.events, e)
	for w := range s.watchers {
		w.tell(e)
	}
}

// watcher is one watch. Its events wait in a queue, so that a writer does not wait for watchers.
type watcher struct {
	store     *store
	namespace string
	selector  fields.Selector

	server *Server
	queue  []event
	more   chan struct{} // holds a value when the queue is not empty
	result chan watch.Event
	stop   chan struct{}
}

// tell queues an event. An object that no longer matches the selector is deleted for a watcher that
// has seen a match.
func (w *watcher) tell(e event) {
	if w.store.matchesSelector(e.object, w.namespace, w.selector) {
		w.queue = append(w.queue, e)
		notify(w.more)
	}
}

// run delivers events until the watch is stopped.
func (w *watcher) run() {
	defer close(w.result)
	for {
		w.server.mu.Lock()
		queue := w.queue
		w.queue = nil
		w.server.mu.Unlock()
		for _, e := range queue {
			select {
			case w.result <- watch.Event{Type: e.kind, Object: e.object.DeepCopyObject()}:
			case <-w.stop:
				return
			}
		}
		select {
		case <-w.more:
		case <-w.stop:
			return
		}
	}
}

// Stop implements [watch.Interface].
func (w *watcher) Stop() {
	w.server.mu.Lock()
	defer w.server.mu.Unlock()
	w.end()
}

// end stops a watch. The caller holds the server's lock.
func (w *watcher) end() {
	if w.store.watchers[w] {
		delete(w.store.watchers, w)
		close(w.stop)
	}
}

// ResultChan implements [watch.Interface].
func (w *watcher) ResultChan() <-chan watch.Event { return w.result }

func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// newUID returns a unique UID for a number.
func newUID(n int64) types.UID { return types.UID(fmt.Sprintf("%08x-0000-4000-8000-%012x", n, n)) }
