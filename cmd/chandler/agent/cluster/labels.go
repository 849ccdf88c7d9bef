package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
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

// FollowLabels tells the labels of a node when it hears them first and whenever they
// change, until the context ends. It is one watch of the node's metadata. A watch without a
// version needs no list before it, since it begins with what is there
// (k8s.io/apiserver/pkg/storage/cacher/cacher.go, Watch, read in 0.28 to 0.37). While the API
// server does not answer, or there is no such node, nothing is told.
func FollowLabels(ctx context.Context, client metadata.Interface, node string, tell func(map[string]string)) {
	f := labelFollower{client: client, node: node, tell: tell}
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
			klog.FromContext(ctx).Error(err, "The labels of the node cannot be followed; those seen last stay in force", "node", node)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, longPause)
	}
}

// labelFollower is a watch that is begun again where it ended.
type labelFollower struct {
	client metadata.Interface
	node   string
	tell   func(map[string]string)

	version string            // of the node as it was heard last, "" if the watch is to begin anew
	heard   bool              // this watch has said something
	last    map[string]string // that were told, nil if none were
}

// watch watches until the API server ends it, as it does after a time. That is no error,
// and neither is that the API server does not remember as far back as the watch goes.
func (f *labelFollower) watch(ctx context.Context) error {
	f.heard = false
	w, err := f.client.Resource(corev1.SchemeGroupVersion.WithResource("nodes")).Watch(ctx, metav1.ListOptions{
		FieldSelector:       fields.OneTermEqualSelector(metav1.ObjectNameField, f.node).String(),
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
			return errors.New("watch node: what the API server says is no metadata of an object")
		}
		f.heard, f.version = true, object.ResourceVersion
		if event.Type == watch.Added || event.Type == watch.Modified {
			f.take(object.Labels)
		}
	}
	return nil
}

// take tells labels that are others than the last. Those of a node that was deleted stay
// until there is another of its name.
func (f *labelFollower) take(labels map[string]string) {
	if f.last != nil && maps.Equal(f.last, labels) {
		return
	}
	f.last = maps.Clone(labels)
	if f.last == nil {
		f.last = map[string]string{}
	}
	f.tell(f.last)
}

// ended returns why a watch ended too early. After one that goes back too far, the next
// one begins anew.
func (f *labelFollower) ended(err error) error {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		f.version = ""
		return nil
	}
	return fmt.Errorf("watch node: %w", err)
}
