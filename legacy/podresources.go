package legacy

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/internal/kubeletapi"
)

// listingOf returns which containers have which IDs of classic resources, by
// what the kubelet says. A container is named "namespace/pod container".
func listingOf(listed *kubeletapi.Listing) *listing {
	said := &listing{containers: make(map[key]string), whole: listed.Whole}
	for _, pod := range listed.Pods {
		for _, container := range pod.Containers {
			for _, devices := range container.Devices {
				for _, id := range devices.DeviceIds {
					said.containers[key{devices.ResourceName, id}] = kubeletapi.PodName(pod) + " " + container.Name
				}
			}
		}
	}
	return said
}

const (
	podResourcesTimeout = 2 * time.Second

	// settling is how long the kubelet may take to show what it was just
	// granted.
	settling = 100 * time.Millisecond

	// notWhole is why an answer may leave something out that is held.
	notWhole = "PodResources does not list the agent's own pod, or no pod at all"
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

// poll enters what PodResources says in the holdings. It logs why it does not
// answer where that is another reason than the last, and returns it.
func (p *Plugin) poll(ctx context.Context, lastError string) string {
	logger := klog.FromContext(ctx)
	began := time.Now()
	asking, cancel := context.WithTimeout(ctx, podResourcesTimeout)
	defer cancel()
	listed, err := p.config.Pods(asking)
	var said *listing
	if err == nil {
		said = listingOf(listed)
	}
	changed := p.holdings.observe(began, said, p.config.Grace)
	reason := ""
	switch {
	case err != nil:
		reason = err.Error()
	case !said.whole:
		reason = notWhole
	case p.expire(ctx):
		changed = true
	}
	if reason != "" && reason != lastError && ctx.Err() == nil {
		logger.Info("What pods hold is not known; no device leaves its resource", "reason", reason)
	}
	if err := p.holdings.removeFiles(); err != nil {
		logger.Error(err, "Host files are left over")
	}
	if changed {
		if err := p.holdings.save(); err != nil {
			logger.Error(err, "What pods hold is not saved")
		}
	}
	return reason
}

// expire drops the grants that no container can have, and reports whether
// there were any.
func (p *Plugin) expire(ctx context.Context) bool {
	if p.config.Pending == nil {
		return false
	}
	dropped := false
	for resource, grants := range p.holdings.unconfirmed(time.Now().Add(-p.config.Unconfirmed)) {
		pending, err := p.config.Pending(ctx, resource)
		if err != nil {
			klog.FromContext(ctx).V(2).Info("Unconfirmed grants are kept", "resource", resource, "reason", err.Error())
		}
		if err == nil && !pending {
			p.holdings.drop(grants)
			dropped = true
		}
	}
	return dropped
}
