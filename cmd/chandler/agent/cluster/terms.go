package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
)

// termsInterval is the interval between checks for grants of unknown pods.
const termsInterval = 5 * time.Second

// term is a pod with devices of the device plugin API, as it was when first seen, or nil if it was
// not found. The ledger needs this data after the pod is gone, and a pod that was deleted by force
// is no longer in the API server.
type term struct {
	lastRequest time.Time
	pod         *corev1.Pod
}

// LearnTerms collects data about the pods with grants, until the context ends.
func (n *Node) LearnTerms(ctx context.Context, l *ledger.Ledger) {
	pause, interval := firstPause(), termsInterval
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(interval):
		}
		if err := n.learnPods(ctx, l.View(nil).OwnGrants()); err != nil {
			klog.FromContext(ctx).V(2).Info("The termination grace periods of pods are unknown; assuming 30 seconds", "reason", err.Error())
			interval = max(termsInterval, pause.Step())
			continue
		}
		pause, interval = firstPause(), termsInterval
	}
}

// learnPods queries the API server if there is a grant of an unknown pod, and removes pods without
// grants.
func (n *Node) learnPods(ctx context.Context, grants []*allocation.Grant) error {
	since := make(map[types.NamespacedName]time.Time)
	for _, g := range grants {
		if owner := g.Owner(); owner.Name != "" {
			name := types.NamespacedName{Namespace: owner.Namespace, Name: owner.Name}
			if before, seen := since[name]; !seen || g.Since.After(before) {
				since[name] = g.Since
			}
		}
	}
	if !n.forgetPods(since) {
		return nil
	}
	asked := time.Now()
	pods, err := n.pods(ctx)
	if err != nil {
		return err
	}
	there := make(map[types.NamespacedName]*corev1.Pod, len(pods))
	for i := range pods {
		there[nameOf(&pods[i])] = &pods[i]
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for name := range since {
		if _, known := n.podsWithGrants[name]; !known {
			n.podsWithGrants[name] = term{asked, there[name].DeepCopy()}
		}
	}
	return nil
}

// forgetPods removes pods that have no grant, or a newer one, and reports whether any of the pods
// is unknown.
func (n *Node) forgetPods(since map[types.NamespacedName]time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	maps.DeleteFunc(n.podsWithGrants, func(name types.NamespacedName, k term) bool {
		at, has := since[name]
		return !has || at.After(k.lastRequest)
	})
	return len(n.podsWithGrants) < len(since)
}

// termOf returns a pod with grants, nil if unknown.
func (n *Node) termOf(namespace, pod string) *corev1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.podsWithGrants[types.NamespacedName{Namespace: namespace, Name: pod}].pod
}

// GracePeriod returns the grace period of a deleted pod's containers, and whether the period is
// known.
func (n *Node) GracePeriod(namespace, pod string) (time.Duration, bool) {
	p := n.termOf(namespace, pod)
	if p == nil || p.Spec.TerminationGracePeriodSeconds == nil {
		return 0, false
	}
	return time.Duration(*p.Spec.TerminationGracePeriodSeconds) * time.Second, true
}

// PodUID returns the kubelet's UID of a pod with grants, "" if unknown.
func (n *Node) PodUID(namespace, pod string) types.UID {
	p := n.termOf(namespace, pod)
	if p == nil {
		return ""
	}
	return KubeletUID(p)
}

// KubeletUID returns the UID that the kubelet uses for a pod, also in the names of control groups.
// The kubelet's UID of a static pod is an annotation of the mirror pod in the API server, which has
// another UID (CreateMirrorPod in pkg/kubelet/pod/mirror_client.go and applyDefaults in
// pkg/kubelet/config/common.go, in 1.31 to 1.37).
func KubeletUID(pod *corev1.Pod) types.UID {
	if of, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror && of != "" {
		return types.UID(of)
	}
	return pod.UID
}

// RequestsResource reports whether a pod requests an extended resource, and whether the answer is
// known.
func (n *Node) RequestsResource(namespace, pod, resource string) (asked, known bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t, known := n.podsWithGrants[types.NamespacedName{Namespace: namespace, Name: pod}]
	return t.pod != nil && slices.Contains(ResourcesOf(t.pod), resource), known
}

// HasEnded queries the API server and reports whether a pod with grants has ended: the pod is gone,
// another pod has its name, or none of its containers runs any more.
func (n *Node) HasEnded(ctx context.Context, namespace, pod string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, AskTimeout)
	defer cancel()
	pods, err := n.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
		FieldSelector: fields.SelectorFromSet(fields.Set{"spec.nodeName": n.name, "metadata.name": pod}).String(),
	})
	if err != nil {
		return false, fmt.Errorf("list pod %s/%s: %w", namespace, pod, err)
	}
	had := n.termOf(namespace, pod)
	return !slices.ContainsFunc(pods.Items, func(now corev1.Pod) bool {
		return goesOn(now) && (had == nil || had.UID == now.UID)
	}), nil
}

// goesOn reports whether a pod still runs: a pod has stopped if it has ended, or if it is deleted
// and its containers have ended.
func goesOn(pod corev1.Pod) bool {
	if isTerminal(pod) {
		return false
	}
	return pod.DeletionTimestamp == nil || slices.ContainsFunc(pod.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool {
		return s.State.Running != nil
	})
}
