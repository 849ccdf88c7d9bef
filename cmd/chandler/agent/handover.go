package agent

import (
	"context"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/internal/handover"
	"chandler.dev/internal/ledger"
)

// handoverDir is the directory of the consumer records of earlier versions.
const handoverDir = "handover"

// newKeeper creates the Custodian, which keeps devices between two consumers.
func (a *agent) newKeeper() *handover.Custodian {
	return handover.New(handover.Config{
		Host:     a.host,
		Write:    a.Write,
		Journal:  a.journal(),
		Earlier:  filepath.Join(a.StateDir, handoverDir),
		Ledger:   a.ledger,
		Stock:    a.stock,
		Rules:    func() []handover.Rule { return a.settings.Load().Handover },
		Snapshot: a.settled.Load,
		PodOf:    func(o ledger.Owner) types.UID { return a.cluster.UID(o.Namespace, o.Name) },
		Users:    a.cluster.Users,
		PodsOf:   a.podsOfNode,
		Changed: func() {
			a.rescan()
			notify(a.rebound)
			notify(a.idle)
		},
	})
}

// podsOfNode returns the node's pods from the API server.
func (a *agent) podsOfNode(ctx context.Context) (map[types.NamespacedName]handover.Pod, error) {
	pods, err := a.cluster.ByName(ctx)
	known := make(map[types.NamespacedName]handover.Pod, len(pods))
	for name, pod := range pods {
		known[name] = handover.Pod{UID: pod.UID, Grace: ledger.Termination}
		if seconds := pod.Spec.TerminationGracePeriodSeconds; seconds != nil {
			known[name] = handover.Pod{UID: pod.UID, Grace: time.Duration(*seconds) * time.Second}
		}
	}
	return known, err
}

// openKeeper loads the records of an earlier agent, before any device can be allocated.
func (a *agent) openKeeper(ctx context.Context) {
	for _, problem := range a.keeper.Load() {
		klog.FromContext(ctx).Error(problem, "Recovering what is to be handed over")
	}
}
