package cluster

import (
	"context"
	"errors"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/internal/kubeletapi"
)

// ListDevices queries the kubelet for the devices of all containers, and determines whether the
// answer is complete. An answer is complete if it contains the agent's own pod. That pod must not
// be a static pod, because the kubelet has static pods before all others. For an agent outside of a
// pod, an answer with all pods of the last complete answer is complete; otherwise the agent
// compares the answer with the API server.
func (n *Node) ListDevices(ctx context.Context) (*kubeletapi.Listing, error) {
	said, err := n.kubelet(ctx)
	if errors.Is(err, kubeletapi.ErrAbsent) && n.ReadCheckpoint != nil {
		n.logAbsence.Do(func() {
			klog.FromContext(ctx).Info("There is no PodResources API; allocations of pods are read from the kubelet's checkpoint", "reason", err.Error())
		})
		return n.readCheckpoint(ctx)
	}
	if err != nil {
		return nil, err
	}
	named := make(map[string]bool, len(said.Pods))
	for _, pod := range said.Pods {
		named[kubeletapi.PodName(pod)] = true
	}
	n.mu.Lock()
	last := n.listedPods
	n.mu.Unlock()
	switch {
	case n.ownPod != "":
		said.Whole = named[n.ownPod]
	case last != nil && hasAll(named, last):
		said.Whole = true
	default:
		said.Whole = n.namesBound(ctx, named)
	}
	if said.Whole {
		n.mu.Lock()
		n.listedPods = named
		n.mu.Unlock()
	}
	n.lastListing.Store(said)
	return said, nil
}

// readCheckpoint returns the devices of the node's pods by the kubelet's checkpoint. The checkpoint
// may contain pods that have ended, and identifies pods only by UID. The UIDs of static pods are
// annotations of their mirror pods in the API server.
func (n *Node) readCheckpoint(ctx context.Context) (*kubeletapi.Listing, error) {
	holdings, err := n.ReadCheckpoint()
	if err != nil {
		return nil, err
	}
	pods, err := n.unendedPods(ctx)
	if err != nil {
		return nil, err
	}
	said := &kubeletapi.Listing{Whole: true}
	for i := range pods {
		pod := &pods[i]
		listed := &podresourcesapi.PodResources{Namespace: pod.Namespace, Name: pod.Name}
		for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			container := &podresourcesapi.ContainerResources{Name: c.Name}
			for _, h := range holdings {
				if h.Container == c.Name && (h.PodUID == string(pod.UID) || h.PodUID == pod.Annotations[corev1.MirrorPodAnnotationKey]) {
					container.Devices = append(container.Devices, &podresourcesapi.ContainerDevices{ResourceName: h.Resource, DeviceIds: h.IDs})
				}
			}
			listed.Containers = append(listed.Containers, container)
		}
		said.Pods = append(said.Pods, listed)
	}
	return said, nil
}

func hasAll(named, pods map[string]bool) bool {
	for pod := range pods {
		if !named[pod] {
			return false
		}
	}
	return true
}

// namesBound reports whether named contains all pods that the API server has bound to the node and
// that have not ended.
func (n *Node) namesBound(ctx context.Context, named map[string]bool) bool {
	pods, err := n.unendedPods(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("It is unknown whether the kubelet lists all pods", "reason", err.Error())
		return false
	}
	bound := make(map[string]bool, len(pods))
	for i := range pods {
		bound[nameOf(&pods[i]).String()] = true
	}
	return hasAll(named, bound)
}
