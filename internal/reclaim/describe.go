package reclaim

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/discovery"
)

// WithheldHealth returns the health of checked devices that cannot be released yet, by name, so that
// no API offers these devices. A shared device stays healthy for its other consumers. The agent
// marks the devices after their states are settled, because a device is withheld without delay.
func (c *Manager) WithheldHealth(severity discovery.Severity) map[string]discovery.Health {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := make(map[string]discovery.Health)
	for _, r := range c.records {
		if r.Ended && r.reason != reasonChecking && r.Hold.Amount == nil {
			kept[r.Hold.Device] = discovery.Health{
				Status: discovery.Unhealthy, Condition: discovery.ConditionUnhealthy, Effect: severity.EffectOf(discovery.ConditionUnhealthy),
				Reason: r.toKept(r.reason).Owner().String(), Since: metav1.NewTime(r.notReadySince.Truncate(time.Second)),
			}
		}
	}
	return kept
}
