package changes

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// The next check is due with the next attempt, and after RetryInterval if no attempt is pending.
func TestAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tries := newAttempts("A device is not returned")
		tries.recordResult(t.Context(), "gone", errors.New("it is in use"))
		time.Sleep(2 * time.Second)
		tries.recordResult(t.Context(), "waiting", errors.New("it is in use"))
		time.Sleep(3 * time.Second)
		for want, units := range map[time.Duration]map[string]bool{RetryInterval: {"fresh": true}, 7 * time.Second: {"waiting": true, "fresh": true}, 5 * time.Second: {"waiting": true, "gone": true}} {
			if got := tries.pause(units); got != want {
				t.Errorf("pause %s for %v, want %s", got, units, want)
			}
		}
		if tries.isDue("waiting") || !tries.isDue("fresh") {
			t.Error("due at another time")
		}
	})
}
