package cluster

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger/allocation"
)

// listing answers like the kubelet's PodResources API.
func listing(pods []*podresourcesapi.PodResources) func(context.Context) (*kubeletapi.Listing, error) {
	return func(context.Context) (*kubeletapi.Listing, error) { return &kubeletapi.Listing{Pods: pods}, nil }
}

func TestAbandoned(t *testing.T) {
	own := &podresourcesapi.PodResources{Namespace: "chandler", Name: "agent"}
	holder := func(device string) *podresourcesapi.PodResources {
		return &podresourcesapi.PodResources{Namespace: "default", Name: "p", Containers: []*podresourcesapi.ContainerResources{{
			DynamicResources: []*podresourcesapi.DynamicResource{{
				ClaimName: "c", ClaimNamespace: "default",
				ClaimResources: []*podresourcesapi.ClaimResource{{CdiDevices: []*podresourcesapi.CDIDevice{{Name: device}}}},
			}},
		}}}
	}
	claim := func(uid types.UID, reserved ...types.UID) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c", UID: uid}}
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Driver: "chandler.dev", Pool: "node/other", Device: "nic"}}}}
		for _, pod := range reserved {
			c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", UID: pod})
		}
		return c
	}
	pod := func(change func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "pod-1"}}
		change(p)
		return p
	}
	byName := pod(func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimName: new("c")}}
	})
	elsewhere := func(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
		c.Status.Allocation.Devices.Results[0].Pool = "other-node"
		return c
	}
	unallocated := func(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
		c.Status.Allocation = nil
		return c
	}
	tests := map[string]struct {
		objects []runtime.Object
		kubelet []*podresourcesapi.PodResources
		want    bool
		byUID   bool // what is wanted if only the UID is known, if that differs
		unknown bool
	}{
		"it is on another node": {objects: []runtime.Object{elsewhere(claim("uid-1"))}, kubelet: []*podresourcesapi.PodResources{own}, want: true},
		"it is not allocated":   {objects: []runtime.Object{unallocated(claim("uid-1"))}, kubelet: []*podresourcesapi.PodResources{own}, want: true},
		"a pod here names it that is on another node": {
			objects: []runtime.Object{byName, elsewhere(claim("uid-1", "pod-1"))}, kubelet: []*podresourcesapi.PodResources{own}},
		"a container has it that is not allocated": {
			objects: []runtime.Object{unallocated(claim("uid-1"))}, kubelet: []*podresourcesapi.PodResources{own, holder("chandler.dev/claim=uid-1-0-gpu")}},
		"it is there":             {objects: []runtime.Object{claim("uid-1")}, kubelet: []*podresourcesapi.PodResources{own}, byUID: true},
		"no pod has it":           {kubelet: []*podresourcesapi.PodResources{own}, want: true},
		"another has its name":    {objects: []runtime.Object{claim("uid-2")}, kubelet: []*podresourcesapi.PodResources{own}, want: true},
		"a container has it":      {kubelet: []*podresourcesapi.PodResources{own, holder("chandler.dev/claim=uid-1-0-gpu")}},
		"a container has another": {kubelet: []*podresourcesapi.PodResources{own, holder("chandler.dev/claim=uid-10-0-gpu")}, want: true},
		"a pod names it":          {objects: []runtime.Object{byName}, kubelet: []*podresourcesapi.PodResources{own}},
		"a pod names its heir":    {objects: []runtime.Object{byName, claim("uid-2", "pod-1")}, kubelet: []*podresourcesapi.PodResources{own}, want: true},
		"of a template": {objects: []runtime.Object{pod(func(p *corev1.Pod) {
			p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{ResourceClaimName: new("c")}}
		})}, kubelet: []*podresourcesapi.PodResources{own}},
		"of an extended resource": {objects: []runtime.Object{pod(func(p *corev1.Pod) {
			p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "c"}
		})}, kubelet: []*podresourcesapi.PodResources{own}},
		"the kubelet has no pods yet": {unknown: true},
	}
	for name, test := range tests {
		// With the UID alone, the result is the same, unless only the claim itself shows that it is
		// allocated here.
		for _, claim := range []allocation.Owner{{UID: "uid-1", Namespace: "default", Name: "c"}, {UID: "uid-1"}} {
			t.Run(name+", as "+claim.Name, func(t *testing.T) {
				want := test.want || test.byUID && claim.Name == ""
				client := fake.NewClientset(test.objects...)
				n := NewNode("node", client, "chandler/agent", listing(test.kubelet))
				abandoned, err := n.AbandonedClaims(t.Context(), []allocation.Owner{claim})
				if (err != nil) != test.unknown || slices.Contains(abandoned, "uid-1") != want {
					t.Errorf("abandoned %v, %v; want %t", abandoned, err, want)
				}
			})
		}
	}
}

// If only the UID of a claim is known, a pod that waits for a claim may wait for that one.
func TestAbandonedByUID(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "pod-1"}}
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimName: new("another")}}
	client := fake.NewClientset(pod)
	kubelet := []*podresourcesapi.PodResources{{Namespace: "chandler", Name: "agent"}}
	n := NewNode("node", client, "chandler/agent", listing(kubelet))
	abandoned, err := n.AbandonedClaims(t.Context(), []allocation.Owner{{UID: "uid-1"}, {UID: "uid-2", Namespace: "default", Name: "c"}})
	if err != nil || !slices.Equal(abandoned, []types.UID{"uid-2"}) {
		t.Errorf("abandoned %v, %v", abandoned, err)
	}
}

// A pod has started if one of its containers has, also while it waits for its other init containers.
func TestStartedPods(t *testing.T) {
	waiting, ran := corev1.ContainerStatus{Name: "wait", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}}, corev1.ContainerStatus{Name: "ran", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}
	pod := func(namespace, name, claim string, status corev1.PodStatus) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + name)}, Status: status,
			Spec: corev1.PodSpec{NodeName: "node", ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}},
		}
	}
	client := fake.NewClientset(
		pod("default", "running", "c", corev1.PodStatus{Phase: corev1.PodRunning}),
		pod("default", "initializing", "c", corev1.PodStatus{Phase: corev1.PodPending, InitContainerStatuses: []corev1.ContainerStatus{ran, waiting}}),
		pod("default", "pending", "c", corev1.PodStatus{Phase: corev1.PodPending, InitContainerStatuses: []corev1.ContainerStatus{waiting}}),
		pod("default", "ended", "c", corev1.PodStatus{Phase: corev1.PodSucceeded, InitContainerStatuses: []corev1.ContainerStatus{ran}}),
		pod("default", "of-another-claim", "d", corev1.PodStatus{Phase: corev1.PodRunning}),
		pod("other", "running", "c", corev1.PodStatus{Phase: corev1.PodRunning}),
	)
	started, err := NewNode("node", client, "", nil).StartedPods(t.Context(), &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c"}})
	if want := []string{"default/initializing", "default/running"}; err != nil || !slices.Equal(started, want) {
		t.Errorf("%v, %v; want %v", started, err, want)
	}
}
