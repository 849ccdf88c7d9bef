package cluster

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"chandler.dev/internal/ledger/allocation"
)

// Each pod is queried once, and its data remains when the pod is gone.
func TestTerms(t *testing.T) {
	train := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "train"}}
	train.Spec.NodeName, train.Spec.TerminationGracePeriodSeconds = "node", new(int64(120))
	train.Spec.Containers = []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{"example.com/gpu": resource.MustParse("1")},
	}}}
	client := fake.NewClientset(train)
	asked, away := 0, false
	client.PrependReactor("list", "pods", func(ktesting.Action) (bool, runtime.Object, error) {
		asked++
		if away {
			return true, nil, errors.New("away")
		}
		return false, nil, nil
	})
	begun := time.Now()
	grant := func(container string, since time.Time) *allocation.Grant {
		return &allocation.Grant{Resource: "example.com/gpu", ID: container, Container: container, Since: since}
	}
	n := NewNode("node", client, "", nil)
	learn := func(when string, want int, grants ...*allocation.Grant) {
		t.Helper()
		err := n.learnPods(t.Context(), grants)
		if asked != want || (err != nil) != away {
			t.Errorf("%s: asked %d times, want %d; %v", when, asked, want, err)
		}
	}
	unconfirmed := grant("", begun)
	learn("nothing is given", 0)
	learn("no consumer is known", 0, unconfirmed)
	away = true
	learn("the API server is away", 1, grant("default/train main", begun))
	if _, known := n.GracePeriod("default", "train"); known {
		t.Error("known without an answer")
	}
	away = false
	mine, gone := grant("default/train main", begun), grant("default/gone main", begun)
	learn("a pod is seen", 2, mine)
	learn("it is known", 2, mine, unconfirmed)
	learn("another pod, which has gone", 3, mine, gone)
	learn("both are known", 3, mine, gone)
	if d, known := n.GracePeriod("default", "train"); !known || d != 2*time.Minute {
		t.Errorf("termination %v, %t", d, known)
	}
	if _, known := n.GracePeriod("default", "gone"); known {
		t.Error("known without an answer that contains it")
	}
	for _, ask := range []struct {
		pod, resource string
		asks, known   bool
	}{{"train", "gpu", true, true}, {"train", "nic", false, true}, {"gone", "gpu", false, true}, {"other", "gpu", false, false}} {
		if asks, known := n.RequestsResource("default", ask.pod, "example.com/"+ask.resource); asks != ask.asks || known != ask.known {
			t.Errorf("pod %s asks for %s: %t, known: %t", ask.pod, ask.resource, asks, known)
		}
	}
	learn("a newer pod of that name", 4, grant("default/train main", time.Now()))
	learn("nothing is given any more", 4)
	if len(n.podsWithGrants) != 0 {
		t.Errorf("remembered: %v", n.podsWithGrants)
	}
}

// A pod has ended when none of its containers runs any more, or when another pod has its name.
func TestEnded(t *testing.T) {
	pod := func(uid string, phase corev1.PodPhase, deleted, runs bool) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "train", UID: types.UID(uid)}}
		p.Spec.NodeName, p.Status.Phase = "node", phase
		if deleted {
			p.DeletionTimestamp, p.Finalizers = &metav1.Time{Time: time.Now()}, []string{"example.com/test"}
		}
		status := corev1.ContainerStatus{Name: "main"}
		if runs {
			status.State.Running = &corev1.ContainerStateRunning{}
		}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{status}
		return p
	}
	for name, test := range map[string]struct {
		pod  *corev1.Pod
		want bool
	}{
		"runs":                   {pod("1", corev1.PodRunning, false, true), false},
		"starts":                 {pod("1", corev1.PodPending, false, false), false},
		"has succeeded":          {pod("1", corev1.PodSucceeded, false, false), true},
		"has failed":             {pod("1", corev1.PodFailed, true, true), true},
		"ends":                   {pod("1", corev1.PodRunning, true, true), false},
		"is about to be gone":    {pod("1", corev1.PodRunning, true, false), true},
		"is gone":                {nil, true},
		"another of the name is": {pod("2", corev1.PodRunning, false, true), true},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset()
			if test.pod != nil {
				client = fake.NewClientset(test.pod)
			}
			n := NewNode("node", client, "", nil)
			n.podsWithGrants[types.NamespacedName{Namespace: "default", Name: "train"}] = term{pod: pod("1", corev1.PodRunning, false, true)}
			if ended, err := n.HasEnded(t.Context(), "default", "train"); ended != test.want || err != nil {
				t.Errorf("ended: %v, %v", ended, err)
			}
		})
	}
}

// The UID of a static pod is the kubelet's, which the cgroup of the pod's processes has.
func TestUID(t *testing.T) {
	mirror := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "static", UID: "of-the-mirror",
		Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "5f1c"}}}
	plain := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "plain", UID: "uid"}}
	for _, pod := range []*corev1.Pod{mirror, plain} {
		pod.Spec.NodeName = "node"
	}
	n := NewNode("node", fake.NewClientset(mirror, plain), "", nil)
	var grants []*allocation.Grant
	for _, pod := range []string{"static", "plain", "gone"} {
		grants = append(grants, &allocation.Grant{Resource: "example.com/gpu", ID: pod, Container: "default/" + pod + " main", Since: time.Now()})
	}
	if err := n.learnPods(t.Context(), grants); err != nil {
		t.Fatal(err)
	}
	for pod, want := range map[string]types.UID{"static": "5f1c", "plain": "uid", "gone": "", "other": ""} {
		if got := n.PodUID("default", pod); got != want {
			t.Errorf("pod %s: %q", pod, got)
		}
	}
}
