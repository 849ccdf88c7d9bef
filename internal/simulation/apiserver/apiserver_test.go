package apiserver

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

func slice(name string) *resourceapi.ResourceSlice {
	node := "node"
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{Driver: "driver", NodeName: &node, Devices: []resourceapi.Device{{
			Name: "device", Taints: []resourceapi.DeviceTaint{{Key: "sick", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
		}}},
	}
}

func TestWrites(t *testing.T) {
	s := New()
	client := s.Client(nil).ResourceV1().ResourceSlices()
	made, err := client.Create(t.Context(), slice("a"), metav1.CreateOptions{})
	if err != nil || made.UID == "" || made.ResourceVersion == "" {
		t.Fatalf("create: %v, %v", made, err)
	}
	if _, err := client.Create(t.Context(), slice("a"), metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		t.Errorf("create again: %v", err)
	}
	dry, err := client.Create(t.Context(), slice("b"), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil || len(dry.Spec.Devices) != 1 || len(s.Slices()) != 1 {
		t.Errorf("a dry run: %v, and there are %d slices", err, len(s.Slices()))
	}
	if _, err := client.Update(t.Context(), made, metav1.UpdateOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := client.Update(t.Context(), made, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("update of an earlier version: %v", err)
	}
	other := made.UID + "x"
	if err := client.Delete(t.Context(), "a", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &other}}); !apierrors.IsConflict(err) {
		t.Errorf("delete of another: %v", err)
	}
}

func TestDroppedFields(t *testing.T) {
	s := New()
	client := s.Client(nil).ResourceV1().ResourceSlices()
	kept, err := client.Create(t.Context(), slice("a"), metav1.CreateOptions{})
	if err != nil || len(kept.Spec.Devices[0].Taints) != 1 {
		t.Fatalf("a field that is kept: %v, %v", kept, err)
	}
	s.SetFeatures(Features{})
	if kept, err = client.Update(t.Context(), kept, metav1.UpdateOptions{}); err != nil || len(kept.Spec.Devices[0].Taints) != 1 {
		t.Errorf("a field that was there before: %v, %v", kept, err)
	}
	dropped, err := client.Create(t.Context(), slice("b"), metav1.CreateOptions{})
	if err != nil || len(dropped.Spec.Devices[0].Taints) != 0 {
		t.Errorf("a field that is dropped: %v, %v", dropped, err)
	}
	none := slice("c")
	s.SetFeatures(Features{Taints: true})
	none.Spec.Devices[0].Taints[0].Effect = resourceapi.DeviceTaintEffectNone
	if _, err := client.Create(t.Context(), none, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("an effect that is not known: %v", err)
	}
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New()
		client := s.Client(nil).ResourceV1().ResourceSlices()
		s.Put(slice("a"))
		s.FreezeLists()
		s.Put(slice("b"))
		past, err := client.List(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
		if err != nil || len(past.Items) != 1 {
			t.Fatalf("a stale list has %d slices: %v", len(past.Items), err)
		}
		w, err := client.Watch(t.Context(), metav1.ListOptions{ResourceVersion: past.ResourceVersion, FieldSelector: "spec.nodeName=node"})
		if err != nil {
			t.Fatal(err)
		}
		if e := <-w.ResultChan(); e.Type != watch.Added || e.Object.(*resourceapi.ResourceSlice).Name != "b" {
			t.Errorf("the first event is %v", e)
		}
		s.DeleteSlices("node")
		if e := <-w.ResultChan(); e.Type != watch.Deleted {
			t.Errorf("the next event is %v", e)
		}
		s.EndWatches()
		for range w.ResultChan() {
		}
	})
}

func TestSlicesGoWithTheirNode(t *testing.T) {
	s := New()
	s.Put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}})
	node, err := s.Client(nil).CoreV1().Nodes().Get(t.Context(), "node", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	owned := slice("a")
	owned.OwnerReferences = []metav1.OwnerReference{{UID: node.UID}}
	s.Put(owned)
	s.Put(slice("b"))
	s.Delete(node)
	if left := s.Slices(); len(left) != 1 || left[0].Name != "b" {
		t.Errorf("there are %v", left)
	}
}

func TestFaults(t *testing.T) {
	s := New()
	gone := errors.New("the process was killed")
	client := s.Client(func(context.Context, Call) error { return gone }).ResourceV1().ResourceSlices()
	if _, err := client.List(t.Context(), metav1.ListOptions{}); !errors.Is(err, gone) {
		t.Errorf("a request that the gate stops: %v", err)
	}
	client = s.Client(nil).ResourceV1().ResourceSlices()
	s.SetFault(func(_ context.Context, call Call) error {
		if call.Verb == "create" && call.DryRun {
			return TooMany()
		}
		return nil
	})
	if _, err := client.Create(t.Context(), slice("a"), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); !apierrors.IsTooManyRequests(err) {
		t.Errorf("a dry run: %v", err)
	}
	if _, err := client.Create(t.Context(), slice("a"), metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
	s.Serve(false)
	if _, err := client.Get(t.Context(), "a", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a group that is not served: %v", err)
	}
}
