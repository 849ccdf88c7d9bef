package cluster

import (
	"context"

	"k8s.io/klog/v2"

	"chandler.dev/internal/kubeletapi"
)

// Listing asks the kubelet what containers have, and finds out whether the answer is
// whole. It is whole if it names the agent's own pod, which must not be a static one,
// since the kubelet knows those before all others. An agent that is no pod goes by
// the last whole answer and, if that named a pod which is missing now, by the API
// server, which it asks only then.
func (n *Node) Listing(ctx context.Context) (*kubeletapi.Listing, error) {
	said, err := n.kubelet(ctx)
	if err != nil {
		return nil, err
	}
	named := make(map[string]bool, len(said.Pods))
	for _, pod := range said.Pods {
		named[kubeletapi.PodName(pod)] = true
	}
	n.mu.Lock()
	last := n.listed
	n.mu.Unlock()
	switch {
	case n.own != "":
		said.Whole = named[n.own]
	case last != nil && hasAll(named, last):
		said.Whole = true
	default:
		said.Whole = n.namesBound(ctx, named)
	}
	if said.Whole {
		n.mu.Lock()
		n.listed = named
		n.mu.Unlock()
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

// namesBound reports whether all pods are named that the API server has bound to
// the node and that have not ended.
func (n *Node) namesBound(ctx context.Context, named map[string]bool) bool {
	pods, err := n.unended(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Whether the kubelet lists all pods cannot be told", "reason", err.Error())
		return false
	}
	bound := make(map[string]bool, len(pods))
	for i := range pods {
		bound[nameOf(&pods[i]).String()] = true
	}
	return hasAll(named, bound)
}
