package legacy

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"chandler.dev/internal/backoff"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger/allocation"
)

const (
	// podResourcesTimeout is long because a kubelet on a busy node may need seconds to answer.
	podResourcesTimeout = 10 * time.Second

	// settleTime is how long the kubelet may take to list a new allocation.
	settleTime = 100 * time.Millisecond

	// endTimeout is how long the API server may take to receive the end of a pod whose devices the
	// kubelet allocates again.
	endTimeout  = 2 * time.Second
	endInterval = 100 * time.Millisecond

	// notWhole is the reason why an answer may lack allocations.
	notWhole = "PodResources does not list all pods yet"
)

// followKubelet calls PodResources at intervals, and soon after each Allocate, until the context
// ends. lastError is the reason of the last failure.
func (p *Plugin) followKubelet(ctx context.Context, lastError string) {
	ticker := time.NewTicker(p.config.Poll)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-p.pollSoon:
			select {
			case <-ctx.Done():
				return
			case <-time.After(settleTime):
			}
		}
		lastError = p.pollOnce(ctx, lastError)
		signal(p.changed)
	}
}

// pollOnce passes the answer of PodResources to the ledger. It returns the reason of a failure, and
// logs the reason if it differs from the last one.
func (p *Plugin) pollOnce(ctx context.Context, lastError string) string {
	logger := klog.FromContext(ctx)
	began := time.Now()
	asking, cancel := context.WithTimeout(ctx, podResourcesTimeout)
	defer cancel()
	said, err := p.config.ListPods(asking)
	if err != nil {
		said = nil
	}
	p.learnNodes(ctx, said)
	if err := p.config.Ledger.Grants.ObserveListing(began, said, p.hostStock); err != nil {
		logger.Error(err, "The devices of pods are not saved, or host files are left over")
	}
	reason := ""
	switch {
	case err != nil:
		reason = err.Error()
	case !said.Whole:
		reason = notWhole
	default:
		p.expireGrants(ctx)
		p.endLost(ctx, p.dueGrants(p.config.Ledger.Grants.LostGrants()))
	}
	if reason != "" && reason != lastError && ctx.Err() == nil {
		logger.Info("The devices of pods are unknown; no device leaves its resource", "reason", reason)
	}
	return reason
}

// learnNodes reads the device nodes of unknown IDs from the kubelet's checkpoint. These are IDs in
// the answer of PodResources, and while the answer is not whole, also those in the checkpoint.
// Listed IDs are read only once. When learnNodes reads more, it drops IDs that are no longer
// listed.
func (p *Plugin) learnNodes(ctx context.Context, said *kubeletapi.Listing) {
	if p.config.Written == nil {
		return
	}
	known, stock := *p.foreignNodes.Load(), p.stock.Load()
	unknown, given := make(map[string]bool), make(map[string][]string)
	note := func(resource, id string) {
		key := allocation.GrantKey(resource, id)
		if nodes, read := known[key]; read {
			given[key] = nodes
		} else if !stock.KnowsDevices(resource, id) {
			unknown[key] = true
		}
	}
	if said == nil {
		said = &kubeletapi.Listing{}
	}
	for _, pod := range said.Pods {
		for _, container := range pod.Containers {
			for _, devices := range container.Devices {
				for _, id := range devices.DeviceIds {
					note(devices.ResourceName, id)
				}
			}
		}
	}
	if said.Whole && len(unknown) == 0 {
		return
	}
	holdings, err := p.config.Written()
	if err != nil {
		klog.FromContext(ctx).V(2).Info("The kubelet's checkpoint is unknown", "reason", err.Error())
	}
	for _, h := range holdings {
		for _, id := range h.IDs {
			if !said.Whole {
				note(h.Resource, id)
			}
			if key := allocation.GrantKey(h.Resource, id); unknown[key] {
				given[key] = h.Nodes
				klog.FromContext(ctx).V(4).Info("An ID of another plugin was found by the device nodes", "resource", h.Resource, "id", id, "nodes", h.Nodes)
			}
		}
	}
	if len(unknown) > 0 {
		p.foreignNodes.Store(&given)
	}
}

// requestPauses spaces repeated requests to the API server, by their subject.
type requestPauses map[string]*requestPause

// requestPause is the pause until the next request about a subject.
type requestPause struct {
	next    time.Time
	backoff wait.Backoff
}

// due returns the subjects of requests that are due: new subjects at once, and the others after
// pauses that grow up to minutes. It forgets subjects that are no longer given. The jitter spreads
// the requests of many nodes.
func (r requestPauses) due(subjects []string) (due []string) {
	maps.DeleteFunc(r, func(subject string, _ *requestPause) bool { return !slices.Contains(subjects, subject) })
	for _, subject := range subjects {
		if r[subject] == nil {
			r[subject] = &requestPause{backoff: backoff.NewPause()}
		}
		if pause := r[subject]; !time.Now().Before(pause.next) {
			pause.next = time.Now().Add(pause.backoff.Step())
			due = append(due, subject)
		}
	}
	return due
}

// expireGrants ends grants that no container can have.
func (p *Plugin) expireGrants(ctx context.Context) {
	if p.config.PendingPods == nil {
		return
	}
	unconfirmed := p.config.Ledger.Grants.UnconfirmedGrants(time.Now().Add(-p.config.UnconfirmedAfter))
	for _, resource := range p.pendingRequests.due(slices.Sorted(maps.Keys(unconfirmed))) {
		grants := unconfirmed[resource]
		pending, err := p.config.PendingPods(ctx, resource)
		if err != nil {
			klog.FromContext(ctx).V(2).Info("Unconfirmed grants are kept", "resource", resource, "reason", err.Error())
		}
		if err != nil || pending {
			continue
		}
		if err := p.config.Ledger.Grants.EndGrants(grants); err != nil {
			klog.FromContext(ctx).Error(err, "Grants that no container can have are left over", "resource", resource)
		}
	}
}

// dueGrants returns the lost grants whose pods the API server is to be asked about now.
func (p *Plugin) dueGrants(lost []*allocation.Grant) []*allocation.Grant {
	var keys []string
	for _, g := range lost {
		keys = append(keys, g.Key())
	}
	due := p.endRequests.due(keys)
	return slices.DeleteFunc(lost, func(g *allocation.Grant) bool { return !slices.Contains(due, g.Key()) })
}

// awaitEnd waits for the end of pods whose IDs the kubelet has forgotten and allocates again. If
// such a pod continues to run, awaitEnd returns at the time end.
func (p *Plugin) awaitEnd(ctx context.Context, grants []*allocation.Grant, end time.Time) {
	again := make(map[string]bool, len(grants))
	for _, g := range grants {
		again[g.Key()] = true
	}
	for {
		lost := slices.DeleteFunc(p.config.Ledger.Grants.LostGrants(), func(g *allocation.Grant) bool { return !again[g.Key()] })
		if len(lost) == 0 || p.endLost(ctx, lost) || time.Now().After(end) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(endInterval):
		}
	}
}

// endLost reports ended pods of lost grants to the ledger, and returns whether all of them have
// ended.
func (p *Plugin) endLost(ctx context.Context, lost []*allocation.Grant) (all bool) {
	if p.config.PodEnded == nil {
		return false
	}
	var over []*allocation.Grant
	for _, g := range lost {
		owner := g.Owner()
		ended, err := p.config.PodEnded(ctx, owner.Namespace, owner.Name)
		if err != nil {
			klog.FromContext(ctx).V(2).Info("It is unknown whether a pod has ended", "pod", owner.Namespace+"/"+owner.Name, "reason", err.Error())
		}
		if ended {
			over = append(over, g)
		}
	}
	p.config.Ledger.Grants.PodsEnded(over)
	return len(over) == len(lost)
}
