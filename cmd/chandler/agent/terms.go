package agent

import (
	"context"
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

// term is what is known of a pod.
type term struct {
	learned time.Time
	found   bool
	grace   time.Duration   // until its containers are killed once it is deleted
	asks    map[string]bool // the resources that its containers ask for
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
	t.mu.Lock()
	known, all := make(map[types.NamespacedName]term), true
	for name, at := range since {
		if before, there := t.known[name]; there && !at.After(before.learned) {
			known[name] = before
			continue
		}
		all = false
	}
	t.known = known
	t.mu.Unlock()
	if all {
		return nil
	}
	asked := time.Now()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	pods, err := podsOf(ctx, t.client, t.node)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for name := range since {
		if _, there := known[name]; !there {
			known[name] = term{learned: asked}
		}
	}
	for i := range pods {
		name := types.NamespacedName{Namespace: pods[i].Namespace, Name: pods[i].Name}
		if at, wanted := since[name]; wanted && !at.After(asked) {
			known[name] = termOf(&pods[i], asked)
		}
	}
	return nil
}

func termOf(pod *corev1.Pod, at time.Time) term {
	t := term{learned: at, asks: make(map[string]bool)}
	if seconds := pod.Spec.TerminationGracePeriodSeconds; seconds != nil {
		t.found, t.grace = true, time.Duration(*seconds)*time.Second
	}
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for _, c := range containers {
			for name := range c.Resources.Limits {
				t.asks[string(name)] = true
			}
		}
	}
	return t
}

// termination returns how long the containers of a pod may go on once it is
// deleted, and whether that is known.
func (t *terms) termination(namespace, pod string) (time.Duration, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	known := t.known[types.NamespacedName{Namespace: namespace, Name: pod}]
	return known.grace, known.found
}

// asks reports whether a pod asks for a classic resource.
func (t *terms) asks(namespace, pod, resource string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.known[types.NamespacedName{Namespace: namespace, Name: pod}].asks[resource]
}
