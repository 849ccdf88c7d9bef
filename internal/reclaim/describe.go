package reclaim

import (
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/discovery"
)

// DescribeDevices returns the settled snapshot with checked devices that cannot be released yet
// marked unhealthy, so that no API offers these devices. A shared device stays healthy for its
// other consumers. Any other fault of a device takes precedence.
func (c *Manager) DescribeDevices(s *discovery.Snapshot, severity discovery.Severity) *discovery.Snapshot {
	kept := c.withheldHealth()
	if len(kept) == 0 {
		return s
	}
	now := *s
	now.Devices = slices.Clone(s.Devices)
	for i := range now.Devices {
		d := &now.Devices[i]
		if h, is := kept[d.Name]; is && (d.Health.Status == discovery.Healthy || d.Health.Status == "") {
			h.Effect = severity.EffectOf(h.Condition)
			d.Health = h
		}
	}
	return &now
}

// withheldHealth returns the health of the withheld devices, by name.
func (c *Manager) withheldHealth() map[string]discovery.Health {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := make(map[string]discovery.Health)
	for _, r := range c.records {
		if r.Ended && r.reason != reasonChecking && r.Hold.Amount == nil {
			kept[r.Hold.Device] = discovery.Health{
				Status: discovery.Unhealthy, Condition: discovery.ConditionUnhealthy,
				Reason: r.toKept(r.reason).Owner().String(), Since: metav1.NewTime(r.notReadySince.Truncate(time.Second)),
			}
		}
	}
	return kept
}
