package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"
)

// How long until a watch that ended is begun again: the first once it has said
// something, doubled up to the longest while it says nothing.
const (
	shortPause = time.Second
	longPause  = time.Minute
)

// follower is a watch of the metadata of one object, which is begun again where it ended. A
// watch without a version needs no list before it, since it begins with what is there
// (k8s.io/apiserver/pkg/storage/cacher/cacher.go, Watch, read in 0.28 to 0.37).
type follower struct {
	of   metadata.ResourceInterface
	name string                              // of the object
	what string                              // its kind, for errors
	lost string                              // what it means that it cannot be followed
	take func(*metav1.PartialObjectMetadata) // is given it as it is first, and whenever it has changed

	version string // of the object as it was heard last, "" if the watch is to begin anew
	heard   bool   // this watch has said something
}

// run follows the object until the context ends. Each reason for a watch that fails is
// logged once.
func (f *follower) run(ctx context.Context) {
	pause, said := shortPause, ""
	for ctx.Err() == nil {
		err := f.watch(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil || f.heard:
			pause, said = shortPause, ""
		case err.Error() != said:
			said = err.Error()
			klog.FromContext(ctx).Error(err, f.lost, f.what, f.name)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, longPause)
	}
}

// watch watches until the API server ends it, as it does after a time. That is no error,
// and neither is that the API server does not remember as far back as the watch goes.
func (f *follower) watch(ctx context.Context) error {
	f.heard = false
	w, err := f.of.Watch(ctx, metav1.ListOptions{
		FieldSelector:       fields.OneTermEqualSelector(metav1.ObjectNameField, f.name).String(),
		ResourceVersion:     f.version,
		AllowWatchBookmarks: true, // so that the version is not too old when the watch begins again
	})
	if err != nil {
		return f.ended(err)
	}
	defer w.Stop()
	for event := range w.ResultChan() {
		if event.Type == watch.Error {
			return f.ended(apierrors.FromObject(event.Object))
		}
		object, ok := event.Object.(*metav1.PartialObjectMetadata)
		if !ok {
			return fmt.Errorf("watch %s: %w", f.what, errNoMetadata)
		}
		f.heard, f.version = true, object.ResourceVersion
		if event.Type == watch.Added || event.Type == watch.Modified {
			f.take(object)
		}
	}
	return nil
}

var errNoMetadata = errors.New("what the API server says is no metadata of an object")

// ended returns why a watch ended too early. After one that goes back too far, the next
// one begins anew.
func (f *follower) ended(err error) error {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		f.version = ""
		return nil
	}
	return fmt.Errorf("watch %s: %w", f.what, err)
}
