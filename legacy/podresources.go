package legacy

import (
	"context"
	"time"

	"k8s.io/klog/v2"
)

const (
	podResourcesTimeout = 2 * time.Second

	// settling is how long the kubelet may take to show what it was just
	// granted.
	settling = 100 * time.Millisecond

	// notWhole is why an answer may leave something out that is held.
	notWhole = "PodResources does not list all pods yet"
)

// follow asks PodResources at intervals, and soon after each Allocate, until
// the context ends. lastError is what kept it from answering before.
func (p *Plugin) follow(ctx context.Context, lastError string) {
	ticker := time.NewTicker(p.config.Poll)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-p.ask:
			select {
			case <-ctx.Done():
				return
			case <-time.After(settling):
			}
		}
		lastError = p.poll(ctx, lastError)
		signal(p.changed)
	}
}

// poll has the ledger observe what PodResources says. It logs why it does not
// answer where that is another reason than the last, and returns it.
func (p *Plugin) poll(ctx context.Context, lastError string) string {
	logger := klog.FromContext(ctx)
	began := time.Now()
	asking, cancel := context.WithTimeout(ctx, podResourcesTimeout)
	defer cancel()
	said, err := p.config.Pods(asking)
	if err != nil {
		said = nil
	}
	if err := p.config.Ledger.Observe(began, said, p.stock.Load()); err != nil {
		logger.Error(err, "What pods have is not saved, or host files are left over")
	}
	reason := ""
	switch {
	case err != nil:
		reason = err.Error()
	case !said.Whole:
		reason = notWhole
	default:
		p.expire(ctx)
	}
	if reason != "" && reason != lastError && ctx.Err() == nil {
		logger.Info("What pods have is not known; no device leaves its resource", "reason", reason)
	}
	return reason
}

// expire ends the grants that no container can have.
func (p *Plugin) expire(ctx context.Context) {
	if p.config.Pending == nil {
		return
	}
	for resource, grants := range p.config.Ledger.Unconfirmed(time.Now().Add(-p.config.Unconfirmed)) {
		pending, err := p.config.Pending(ctx, resource)
		if err != nil {
			klog.FromContext(ctx).V(2).Info("Unconfirmed grants are kept", "resource", resource, "reason", err.Error())
		}
		if err != nil || pending {
			continue
		}
		if err := p.config.Ledger.EndGrants(grants); err != nil {
			klog.FromContext(ctx).Error(err, "Grants that no container can have are left over", "resource", resource)
		}
	}
}
