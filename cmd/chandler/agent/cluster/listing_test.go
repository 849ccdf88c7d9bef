package cluster

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/internal/kubeletapi"
)

// A kubelet that has just started omits pods. An agent in a pod detects this by its own pod. Any
// other agent queries the API server, but only if a pod is missing.
func TestListings(t *testing.T) {
	steps := []struct {
		name      string
		listed    string
		bound     string // pods of the API server; "!" marks a pod that has ended; "-" is an unreachable server
		pod, none bool   // whether the answer is complete for an agent in a pod, and outside of one
		asked     bool   // whether an agent outside of a pod queries the API server
	}{
		{"after its start", "", "agent train", false, false, true},
		{"static pods", "proxy", "agent proxy train", false, false, true},
		{"the API server is away", "agent train", "-", true, false, true},
		{"all pods", "agent proxy train", "agent proxy train", true, true, true},
		{"the same pods", "agent proxy train", "-", true, true, false},
		{"another pod", "agent proxy train web", "-", true, true, false},
		{"a pod that has not ended is missing", "agent proxy web", "agent proxy train web", true, false, true},
		{"the kubelet has started anew", "proxy", "agent proxy train web", false, false, true},
		{"a pod has ended", "agent proxy web", "agent proxy train! web", true, true, true},
		{"a pod is gone", "agent web", "agent web", true, true, true},
		{"without it", "agent web", "-", true, true, false},
	}
	for name, own := range map[string]string{"a pod": "default/agent", "no pod": ""} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset()
			var listed, bound string
			asked := false
			client.PrependReactor("list", "pods", func(ktesting.Action) (bool, runtime.Object, error) {
				asked = true
				if bound == "-" {
					return true, nil, errors.New("away")
				}
				list := &corev1.PodList{}
				for name := range strings.FieldsSeq(bound) {
					name, ended := strings.CutSuffix(name, "!")
					pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
					if ended {
						pod.Status.Phase = corev1.PodSucceeded
					}
					list.Items = append(list.Items, pod)
				}
				return true, list, nil
			})
			n := NewNode("node", client, own, func(context.Context) (*kubeletapi.Listing, error) {
				said := &kubeletapi.Listing{}
				for name := range strings.FieldsSeq(listed) {
					said.Pods = append(said.Pods, &podresourcesapi.PodResources{Namespace: "default", Name: name})
				}
				return said, nil
			})
			for _, step := range steps {
				listed, bound, asked = step.listed, step.bound, false
				said, err := n.ListDevices(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				whole, asks := step.none, step.asked
				if own != "" {
					whole, asks = step.pod, false
				}
				if said.Whole != whole || asked != asks {
					t.Errorf("%s: whole %t, want %t; asked %t, want %t", step.name, said.Whole, whole, asked, asks)
				}
			}
		})
	}
}

// Without a PodResources API, the devices of running pods are read from the kubelet's checkpoint.
func TestListingWithoutPodResources(t *testing.T) {
	pod := func(name, uid string, phase corev1.PodPhase, containers ...string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(uid)}}
		p.Spec.NodeName, p.Status.Phase = "node", phase
		for _, c := range containers {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: c})
		}
		return p
	}
	static := pod("static", "mirror", corev1.PodRunning, "main")
	static.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "hash"}
	client := fake.NewClientset(pod("train", "1", corev1.PodRunning, "main", "side"), pod("over", "2", corev1.PodSucceeded, "main"), static)
	n := NewNode("node", client, "default/agent", func(ctx context.Context) (*kubeletapi.Listing, error) {
		return kubeletapi.ListPods(ctx, filepath.Join(t.TempDir(), "kubelet.sock"))
	})
	if _, err := n.ListDevices(t.Context()); !errors.Is(err, kubeletapi.ErrAbsent) {
		t.Errorf("without a checkpoint: %v", err)
	}
	n.ReadCheckpoint = func() ([]kubeletapi.Holding, error) {
		return []kubeletapi.Holding{
			{PodUID: "1", Container: "main", Resource: "a.b/gpu", IDs: []string{"0", "1"}},
			{PodUID: "2", Container: "main", Resource: "a.b/gpu", IDs: []string{"2"}},
			{PodUID: "gone", Container: "main", Resource: "a.b/gpu", IDs: []string{"3"}},
			{PodUID: "hash", Container: "main", Resource: "a.b/gpu", IDs: []string{"4"}},
		}, nil
	}
	said, err := n.ListDevices(t.Context())
	if err != nil || !said.Whole {
		t.Fatalf("%+v, %v", said, err)
	}
	got := make(map[string][]string)
	for _, pod := range said.Pods {
		for _, c := range pod.Containers {
			got[kubeletapi.PodName(pod)+" "+c.Name] = nil
			for _, d := range c.Devices {
				got[kubeletapi.PodName(pod)+" "+c.Name] = d.DeviceIds
			}
		}
	}
	want := map[string][]string{"default/train main": {"0", "1"}, "default/train side": nil, "default/static main": {"4"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
