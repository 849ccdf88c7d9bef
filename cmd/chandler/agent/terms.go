package agent

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"chandler.dev/internal/ledger"
)

// termsInterval is how often it is looked whether there are grants of pods whose
// terms are not known.
const termsInterval = 5 * time.Second

// terms remembers of pods that have classic devices what the ledger needs when
// they are gone. A pod that is deleted by force cannot be asked about any more,
// so it is asked about once, when it is first seen.
type terms struct {
	client kubernetes.Interface
	node   string

	mu    sync.Mutex
	known map[types.NamespacedName]term
}

// term is a pod as it was when it was asked about, nil if it was not there.
type term struct {
	asked time.Time
	pod   *corev1.Pod
}

// run learns the terms of pods that get grants, until the context ends.
func (t *terms) run(ctx context.Context, l *ledger.Ledger) {
	ticker := time.NewTicker(termsInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := t.learn(ctx, l.View(nil).Ours()); err != nil {
			klog.FromContext(ctx).V(2).Info("How long pods take to end is not known; taking it for 30 seconds", "reason", err.Error())
		}
	}
}

// learn asks the API server, if there is a grant of a pod whose terms are not
// known, and forgets pods that have none.
func (t *terms) learn(ctx context.Context, grants []*ledger.Grant) error {
	since := make(map[types.NamespacedName]time.Time)
	for _, g := range grants {
		if owner := g.Owner(); owner.Name != "" {
			name := types.NamespacedName{Namespace: owner.Namespace, Name: owner.Name}
			if before, seen := since[name]; !seen || g.Since.After(before) {
				since[name] = g.Since
			}
		}
	}
	if !t.outdated(since) {
		return nil
	}
	asked := time.Now()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	pods, err := podsOf(ctx, t.client, t.node)
	if err != nil {
		return err
	}
	there := make(map[types.NamespacedName]*corev1.Pod, len(pods))
	for i := range pods {
		there[types.NamespacedName{Namespace: pods[i].Namespace, Name: pods[i].Name}] = &pods[i]
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for name := range since {
		if _, known := t.known[name]; !known {
			t.known[name] = term{asked, there[name]}
		}
	}
	return nil
}

// outdated forgets pods that have no grant, or a newer one, and reports whether any
// of the pods is not known.
func (t *terms) outdated(since map[types.NamespacedName]time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.known == nil {
		t.known = make(map[types.NamespacedName]term)
	}
	maps.DeleteFunc(t.known, func(name types.NamespacedName, k term) bool {
		at, has := since[name]
		return !has || at.After(k.asked)
	})
	return len(t.known) < len(since)
}

// of returns a pod that has grants, nil if it is not known.
func (t *terms) of(namespace, pod string) *corev1.Pod {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.known[types.NamespacedName{Namespace: namespace, Name: pod}].pod
}

// termination returns how long the containers of a pod may go on once it is
// deleted, and whether that is known.
func (t *terms) termination(namespace, pod string) (time.Duration, bool) {
	p := t.of(namespace, pod)
	if p == nil || p.Spec.TerminationGracePeriodSeconds == nil {
		return 0, false
	}
	return time.Duration(*p.Spec.TerminationGracePeriodSeconds) * time.Second, true
}

// asks reports whether a pod asks for a classic resource.
func (t *terms) asks(namespace, pod, resource string) bool {
	p := t.of(namespace, pod)
	return p != nil && slices.ContainsFunc(slices.Concat(p.Spec.InitContainers, p.Spec.Containers), func(c corev1.Container) bool {
		_, asks := c.Resources.Limits[corev1.ResourceName(resource)]
		return asks
	})
}
