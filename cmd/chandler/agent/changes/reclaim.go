package changes

import (
	"context"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/podclaims"
	"chandler.dev/internal/reclaim"
)

// EarlierReclaimDir is the directory of the consumer records of earlier versions.
const EarlierReclaimDir = "handover"

// newReclaim creates the [reclaim.Manager], which withholds devices between two consumers.
func (c *Manager) newReclaim() *reclaim.Manager {
	node := c.config.Cluster
	return reclaim.New(reclaim.Config{
		Host:     c.config.Host,
		Finder:   c.uses.finder,
		Write:    c.write,
		Journal:  c.config.Journal,
		Earlier:  filepath.Join(c.config.StateDir, EarlierReclaimDir),
		Ledger:   c.config.Ledger,
		Stock:    c.stock,
		Rules:    c.config.Reclaim,
		Snapshot: c.config.Snapshot,
		PodOf:    func(o allocation.Owner) types.UID { return node.PodUID(o.Namespace, o.Name) },
		Users:    node.PodsOf,
		PodsOf:   func(ctx context.Context) (map[types.NamespacedName]reclaim.Pod, error) { return podsOfNode(ctx, node) },
		Changed: func() {
			c.config.RequestScan()
			c.CheckUndo()
		},
	})
}

// podsOfNode returns the node's pods from the API server.
func podsOfNode(ctx context.Context, node *cluster.Node) (map[types.NamespacedName]reclaim.Pod, error) {
	pods, err := node.ByName(ctx)
	known := make(map[types.NamespacedName]reclaim.Pod, len(pods))
	for name, pod := range pods {
		p := reclaim.Pod{UID: cluster.KubeletUID(pod), Grace: ledger.DefaultTermination, Claims: podclaims.ClaimsOf(pod), Resources: cluster.ResourcesOf(pod)}
		if seconds := pod.Spec.TerminationGracePeriodSeconds; seconds != nil {
			p.Grace = time.Duration(*seconds) * time.Second
		}
		known[name] = p
	}
	return known, err
}

// LoadReclaim loads the records of an earlier agent, before any device can be allocated.
func (c *Manager) LoadReclaim(ctx context.Context) {
	for _, problem := range c.Reclaim.Load() {
		klog.FromContext(ctx).Error(problem, "Reading the records of reclaim")
	}
}
