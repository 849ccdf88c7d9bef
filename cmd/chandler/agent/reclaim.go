package agent

import (
	"context"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/discovery"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/reclaim"
)

// earlierReclaimDir is the directory of the consumer records of earlier versions.
const earlierReclaimDir = "handover"

// newReclaim creates the [reclaim.Manager], which withholds devices between two consumers.
func (a *agent) newReclaim() *reclaim.Manager {
	return reclaim.New(reclaim.Config{
		Host:     a.host,
		Finder:   a.finder,
		Write:    a.Write,
		Journal:  a.journalConfig(),
		Earlier:  filepath.Join(a.StateDir, earlierReclaimDir),
		Ledger:   a.ledger,
		Stock:    a.stock,
		Rules:    func() []discovery.Selection[reclaim.Rule] { return a.settings.Load().Reclaim },
		Snapshot: a.settledSnapshot.Load,
		PodOf:    func(o ledger.Owner) types.UID { return a.cluster.PodUID(o.Namespace, o.Name) },
		Users:    a.cluster.PodsOf,
		PodsOf:   a.podsOfNode,
		Changed: func() {
			a.requestScan()
			notify(a.returnDue)
			notify(a.unitIdle)
		},
	})
}

// podsOfNode returns the node's pods from the API server.
func (a *agent) podsOfNode(ctx context.Context) (map[types.NamespacedName]reclaim.Pod, error) {
	pods, err := a.cluster.ByName(ctx)
	known := make(map[types.NamespacedName]reclaim.Pod, len(pods))
	for name, pod := range pods {
		p := reclaim.Pod{UID: cluster.KubeletUID(pod), Grace: ledger.DefaultTermination, Claims: cluster.ClaimsOf(pod), Resources: cluster.ResourcesOf(pod)}
		if seconds := pod.Spec.TerminationGracePeriodSeconds; seconds != nil {
			p.Grace = time.Duration(*seconds) * time.Second
		}
		known[name] = p
	}
	return known, err
}

// openReclaim loads the records of an earlier agent, before any device can be allocated.
func (a *agent) openReclaim(ctx context.Context) {
	for _, problem := range a.reclaim.Load() {
		klog.FromContext(ctx).Error(problem, "Reading the records of reclaim")
	}
}
