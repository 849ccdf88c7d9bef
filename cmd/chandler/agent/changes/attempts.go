package changes

import (
	"context"
	"time"

	"k8s.io/klog/v2"
)

// attempts paces the attempts to restore units of the host to their state before allocation. After
// a failed attempt the agent pauses for RetryInterval, and logs each new reason once.
type attempts struct {
	message string // log message of a failure

	lastFailure map[string]time.Time // by unit, when the last attempt failed
	lastError   map[string]string    // by unit, why the last attempt failed
}

func newAttempts(failing string) *attempts {
	return &attempts{message: failing, lastFailure: make(map[string]time.Time), lastError: make(map[string]string)}
}

// isDue reports whether the unit has never failed, or failed at least RetryInterval ago.
func (t *attempts) isDue(unit string) bool { return time.Since(t.lastFailure[unit]) >= RetryInterval }

// pause returns how long to wait, without other events, before the next check: until the next
// attempt for one of the units is due, and at most RetryInterval.
func (t *attempts) pause(units map[string]bool) time.Duration {
	pause := RetryInterval
	for unit := range units {
		if left := RetryInterval - time.Since(t.lastFailure[unit]); left > 0 {
			pause = min(pause, left)
		}
	}
	return pause
}

// recordResult records the result of an attempt, and logs an error unless the last attempt failed
// alike.
func (t *attempts) recordResult(ctx context.Context, unit string, err error) {
	if err == nil {
		delete(t.lastFailure, unit)
		delete(t.lastError, unit)
		return
	}
	if t.lastError[unit] != err.Error() {
		klog.FromContext(ctx).Error(err, t.message+"; trying again", "unit", unit, "interval", RetryInterval)
	}
	t.lastFailure[unit], t.lastError[unit] = time.Now(), err.Error()
}
