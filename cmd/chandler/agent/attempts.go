package agent

import (
	"context"
	"time"

	"k8s.io/klog/v2"
)

// attempts paces the attempts to restore units of the host to their state before allocation. After
// a failed attempt the agent pauses for refuseInterval, and logs each new reason once.
type attempts struct {
	failing string // log message of a failure

	failed map[string]time.Time // by unit, when the last attempt failed
	said   map[string]string    // by unit, why the last attempt failed
}

func newAttempts(failing string) *attempts {
	return &attempts{failing: failing, failed: make(map[string]time.Time), said: make(map[string]string)}
}

// due reports whether the unit has never failed, or failed at least refuseInterval ago.
func (t *attempts) due(unit string) bool { return time.Since(t.failed[unit]) >= refuseInterval }

// pause returns how long to wait, without other events, before the next check: until the next
// attempt for one of the units is due, and at most refuseInterval.
func (t *attempts) pause(units map[string]bool) time.Duration {
	pause := refuseInterval
	for unit := range units {
		if left := refuseInterval - time.Since(t.failed[unit]); left > 0 {
			pause = min(pause, left)
		}
	}
	return pause
}

// ended records the result of an attempt, and logs an error unless the last attempt failed alike.
func (t *attempts) ended(ctx context.Context, unit string, err error) {
	if err == nil {
		delete(t.failed, unit)
		delete(t.said, unit)
		return
	}
	if t.said[unit] != err.Error() {
		klog.FromContext(ctx).Error(err, t.failing+"; trying again", "unit", unit, "interval", refuseInterval)
	}
	t.failed[unit], t.said[unit] = time.Now(), err.Error()
}
