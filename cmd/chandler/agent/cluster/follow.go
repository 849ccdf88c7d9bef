package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"
)

// firstPause returns the pauses before a watch restarts: the first one after a watch with an event or
// a regular end, and longer ones after failures. The jitter spreads the watches of many nodes after a
// restart of the API server.
func firstPause() wait.Backoff {
	return wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 1, Steps: 10, Cap: 2 * time.Minute}
}

// follower watches the metadata of one object, and restarts the watch where the last one ended. A
// watch without a resource version needs no list before it, because it begins with the current
// state (k8s.io/apiserver/pkg/storage/cacher/cacher.go, Watch, read in 0.28 to 0.37).
type follower struct {
	resource       metadata.ResourceInterface
	name           string                              // of the object
	what           string                              // the object's kind, for errors
	failureMessage string                              // the log message when the watch fails
	receive        func(*metav1.PartialObjectMetadata) // receives the object, at first and after each change

	version       string // last received version of the object, "" to begin without a version
	receivedEvent bool   // this watch has received an event
}

// run follows the object until the context ends. Each reason for a failed watch is logged once.
func (f *follower) run(ctx context.Context) {
	pause, said := firstPause(), ""
	for ctx.Err() == nil {
		err := f.watchOnce(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil || f.receivedEvent:
			pause, said = firstPause(), ""
		case err.Error() != said:
			said = err.Error()
			klog.FromContext(ctx).Error(err, f.failureMessage, f.what, f.name)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause.Step()):
		}
	}
}

// watchOnce watches until the API server ends the watch, as usual after some time. A regular end
// and an expired resource version are not errors.
func (f *follower) watchOnce(ctx context.Context) error {
	f.receivedEvent = false
	w, err := f.resource.Watch(ctx, metav1.ListOptions{
		FieldSelector:       fields.OneTermEqualSelector(metav1.ObjectNameField, f.name).String(),
		ResourceVersion:     f.version,
		AllowWatchBookmarks: true, // keep the version recent enough for the next watch
	})
	if err != nil {
		return f.watchError(err)
	}
	defer w.Stop()
	for event := range w.ResultChan() {
		if event.Type == watch.Error {
			return f.watchError(apierrors.FromObject(event.Object))
		}
		object, ok := event.Object.(*metav1.PartialObjectMetadata)
		if !ok {
			return fmt.Errorf("watch %s: %w", f.what, errNoMetadata)
		}
		f.receivedEvent, f.version = true, object.ResourceVersion
		if event.Type == watch.Added || event.Type == watch.Modified {
			f.receive(object)
		}
	}
	return nil
}

var errNoMetadata = errors.New("the API server's answer is not the metadata of an object")

// watchError returns the error of a failed watch. After the expiry of a version, there is no error,
// and the next watch begins without a version.
func (f *follower) watchError(err error) error {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		f.version = ""
		return nil
	}
	return fmt.Errorf("watch %s: %w", f.what, err)
}
