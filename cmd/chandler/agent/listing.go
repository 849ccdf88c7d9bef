package agent

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"chandler.dev/internal/kubeletapi"
)

// listings are what the kubelet's PodResources API says.
type listings struct {
	ask    func(ctx context.Context) (*kubeletapi.Listing, error)
	own    string // the agent's own pod, "" if it is none
	client kubernetes.Interface
	node   string

	mu   sync.Mutex
	last map[string]bool // the pods that the last whole answer named; nil: there was none
}

// list asks the kubelet, and finds out whether its answer is whole. It is whole
// if it names the agent's own pod, which must not be a static one, since the
// kubelet knows those before all others. An agent that is no pod goes by the
// last whole answer and, if that named a pod which is missing now, by the API
// server, which it asks only then.
func (l *listings) list(ctx context.Context) (*kubeletapi.Listing, error) {
	said, err := l.ask(ctx)
	if err != nil {
		return nil, err
	}
	named := make(map[string]bool, len(said.Pods))
	for _, pod := range said.Pods {
		named[kubeletapi.PodName(pod)] = true
	}
	l.mu.Lock()
	last := l.last
	l.mu.Unlock()
	switch {
	case l.own != "":
		said.Whole = named[l.own]
	case last != nil && hasAll(named, last):
		said.Whole = true
	default:
		said.Whole = l.namesBound(ctx, named)
	}
	if said.Whole {
		l.mu.Lock()
		l.last = named
		l.mu.Unlock()
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
func (l *listings) namesBound(ctx context.Context, named map[string]bool) bool {
	pods, err := podsOf(ctx, l.client, l.node)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Whether the kubelet lists all pods cannot be told", "reason", err.Error())
		return false
	}
	bound := make(map[string]bool, len(pods))
	for i := range pods {
		if !ended(&pods[i]) {
			bound[types.NamespacedName{Namespace: pods[i].Namespace, Name: pods[i].Name}.String()] = true
		}
	}
	return hasAll(named, bound)
}
