package cluster

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/internal/podevents"
)

// Pods are listed with all of their claims, until they end.
func TestPods(t *testing.T) {
	pod := func(name string, phase corev1.PodPhase) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
			Spec:       corev1.PodSpec{NodeName: "node"},
			Status:     corev1.PodStatus{Phase: phase},
		}
	}
	running := pod("running", corev1.PodRunning)
	running.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimName: new("own")}, {Name: "y", ResourceClaimTemplateName: new("template")}}
	running.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "y", ResourceClaimName: new("of-the-group")}}
	running.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "extended"}
	client := fake.NewClientset(running, pod("starting", corev1.PodPending), pod("done", corev1.PodSucceeded), pod("failed", corev1.PodFailed))
	got, err := NewNode("node", client, "", nil).Pods(t.Context())
	want := []podevents.Pod{
		{NamespacedName: types.NamespacedName{Namespace: "default", Name: "running"}, UID: "uid-running", Claims: []string{"own", "of-the-group", "extended"}},
		{NamespacedName: types.NamespacedName{Namespace: "default", Name: "starting"}, UID: "uid-starting"},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
}

func TestPassesCDI(t *testing.T) {
	for version, want := range map[string]bool{"v1.28.15": false, "v1.29.0": true, "v1.31.2+k3s1": true, "v2.0.0": true} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}, Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: version}}}
		if got, err := NewNode("node", fake.NewClientset(node), "", nil).PassesCDI(t.Context()); err != nil || got != want {
			t.Errorf("%s: %v, %v", version, got, err)
		}
	}
	for name, node := range map[string]*corev1.Node{"no such node": {ObjectMeta: metav1.ObjectMeta{Name: "other"}}, "no version": {ObjectMeta: metav1.ObjectMeta{Name: "node"}}} {
		if _, err := NewNode("node", fake.NewClientset(node), "", nil).PassesCDI(t.Context()); err == nil {
			t.Errorf("%s is no error", name)
		}
	}
}

// The UID and the versions of a Node cost one request. A Node that was created again is seen.
func TestOneReadOfTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		object := func(uid types.UID) *corev1.Node {
			return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: uid}, Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v1.37.0", ContainerRuntimeVersion: "containerd://2.1.4"}}}
		}
		client := fake.NewClientset(object("first"))
		node := NewNode("node", client, "", nil)
		for _, want := range []types.UID{"first", "second"} {
			client.ClearActions()
			uid, err := node.UID(t.Context())
			passes, passesErr := node.PassesCDI(t.Context())
			runtime, runtimeErr := node.Runtime(t.Context())
			if err := errors.Join(err, passesErr, runtimeErr); err != nil || uid != want || !passes || runtime != "containerd://2.1.4" {
				t.Errorf("UID %s, want %s; %t; %s; %v", uid, want, passes, runtime, err)
			}
			if n := len(client.Actions()); n != 1 {
				t.Errorf("%d requests, want 1", n)
			}
			if err := client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), object("second"), ""); err != nil {
				t.Fatal(err)
			}
			time.Sleep(nodeFresh)
		}
	})
}

// AskForBoth is true if exactly one starting pod requests both resources in one container.
func TestAskForBoth(t *testing.T) {
	const gpu, audio = "nvidia.com/GP102", "nvidia.com/audio"
	pod := func(name string, containers ...[]string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PodSpec{NodeName: "node"}}
		for _, resources := range containers {
			limits := make(corev1.ResourceList)
			for _, name := range resources {
				limits[corev1.ResourceName(name)] = resource.MustParse("1")
			}
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Resources: corev1.ResourceRequirements{Limits: limits}})
		}
		return p
	}
	for name, test := range map[string]struct {
		pods   []*corev1.Pod
		listed []string
		want   bool
	}{
		"one pod":             {[]*corev1.Pod{pod("vm", []string{gpu, audio}), pod("other", []string{gpu})}, nil, true},
		"no pod":              {[]*corev1.Pod{pod("one", []string{gpu}), pod("other", []string{audio})}, nil, false},
		"two containers":      {[]*corev1.Pod{pod("vm", []string{gpu}, []string{audio})}, nil, false},
		"two pods":            {[]*corev1.Pod{pod("vm", []string{gpu, audio}), pod("other", []string{gpu, audio})}, nil, false},
		"one of two is known": {[]*corev1.Pod{pod("vm", []string{gpu, audio}), pod("other", []string{gpu, audio})}, []string{"other"}, true},
		"it is known":         {[]*corev1.Pod{pod("vm", []string{gpu, audio})}, []string{"vm"}, false},
	} {
		var objects []runtime.Object
		for _, p := range test.pods {
			objects = append(objects, p)
		}
		var listed []*podresourcesapi.PodResources
		for _, name := range test.listed {
			listed = append(listed, &podresourcesapi.PodResources{Namespace: "default", Name: name})
		}
		n := NewNode("node", fake.NewClientset(objects...), "", listing(listed))
		if _, err := n.ListDevices(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got, err := n.AskForBoth(t.Context(), gpu, audio); err != nil || got != test.want {
			t.Errorf("%s: %t, %v", name, got, err)
		}
	}
}
