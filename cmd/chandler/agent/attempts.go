package agent

import (
	"context"
	"time"

	"k8s.io/klog/v2"
)

// attempts are those to make units of the host what they were before somebody got them. After one that
// failed the next one waits, and each reason is said once.
type attempts struct {
	failing string // what a failure means, for the log

	failed map[string]time.Time // by unit, when the last attempt failed
	said   map[string]string    // likewise, why
}

func newAttempts(failing string) *attempts {
	return &attempts{failing: failing, failed: make(map[string]time.Time), said: make(map[string]string)}
}

// due reports whether it is time for an attempt.
func (t *attempts) due(unit string) bool { return time.Since(t.failed[unit]) >= refuseInterval }

// pause returns how long until it is to be looked again whether there is something to do, if nothing is heard
// meanwhile: until the next attempt for one of some units, at most.
func (t *attempts) pause(units map[string]bool) time.Duration {
	pause := refuseInterval
	for unit := range units {
		if left := refuseInterval - time.Since(t.failed[unit]); left > 0 {
			pause = min(pause, left)
		}
	}
	return pause
}

// ended says how an attempt ended.
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
