package publish

import (
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/backoff"
)

// repeatFor is how long after a registration the driver repeats the publication, with pauses that
// double from one second. A kubelet that starts deletes all slices of its node, and so does a
// kubelet that was disconnected from a driver for 30 s
// (pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go). The library alone would create them again 30 s
// later (resourceslice.DefaultSyncDelay). A repetition does not write existing slices.
const repeatFor = 15 * time.Second

// retryAfter is the shortest time between a failed write and the next publication, which may come up
// to half of retryAfter later. The library's own delays double with each consecutive failure, up to
// 1,000 s (workqueue.DefaultTypedControllerRateLimiter in client-go 0.37), and a kubelet that starts
// in the meantime would leave the node without slices for that time.
const retryAfter = time.Minute

// schedule decides when to publish slices and when to detect the API server's features.
type schedule struct {
	wanted          *resourceslice.DriverResources // the pools to publish, nil before the first scan
	problems        []discovery.Problem            // why wanted lacks devices
	wantedInput     pool.Input                     // input of wanted
	lastBeside      *resourceslice.DriverResources // last at the time when wanted was computed
	nextChange      time.Time                      // when wanted changes without an event, zero if it does not
	last            *resourceslice.DriverResources // the pools published last, nil before the first publication
	earlier         *resourceslice.DriverResources // the pools of an earlier agent, nil if they were not read or after the first publication
	lastPublication time.Time                      // time of the last publication or repetition

	lastRegistration time.Time // time of the kubelet's last registration, zero if there was none
	firstFailure     time.Time // first failed write of the present pools, zero if there was none

	startTime         time.Time
	nextDetection     time.Time // time of the next detection of features
	featuresKnown     bool      // the features were detected, or the server has refused for long enough
	featuresConfirmed bool      // features were detected while wanted was pending
	retryDetection    time.Time // when to detect again if a publication waits for it; zero, for at once, after a success
	retryPause        wait.Backoff
}

// step is the next action of a publisher.
type step string

const (
	idle    step = "idle"
	detect  step = "detect" // detect the API server's features
	publish step = "publish"
)

// next returns the next action, and for idle the time until which to wait.
func (s *schedule) next(now time.Time) (do step, until time.Time) {
	due, waits := s.nextDetection, s.waitsForFeatures()
	if waits && s.retryDetection.Before(due) {
		due = s.retryDetection
	}
	again := s.nextRepetition()
	switch {
	case !now.Before(due):
		return detect, now
	case !waits && s.isUnpublished(), !again.IsZero() && !now.Before(again):
		return publish, now
	}
	return idle, earlierOf(earlierOf(due, again), s.nextChange)
}

// isUnpublished reports whether the wanted pools differ from the published ones.
func (s *schedule) isUnpublished() bool {
	return s.wanted != nil && s.wanted != s.last && (s.last == nil || !equality.Semantic.DeepEqual(*s.last, *s.wanted))
}

// waitsForFeatures reports whether features must be detected before the next publication. A server
// that now drops counters keeps those of existing slices.
func (s *schedule) waitsForFeatures() bool {
	return !s.featuresKnown || !s.featuresConfirmed && s.last != nil && s.isUnpublished() && pool.CompeteNewly(*s.last, *s.wanted)
}

// nextRepetition returns the time of the next repetition, or zero.
func (s *schedule) nextRepetition() time.Time {
	if s.last == nil {
		return time.Time{}
	}
	var retry time.Time
	if !s.firstFailure.IsZero() {
		retry = s.firstFailure.Add(retryAfter)
	}
	if s.lastRegistration.IsZero() {
		return retry
	}
	for after := time.Second; after <= repeatFor; after = 2*after + time.Second {
		if at := s.lastRegistration.Add(after); at.After(s.lastPublication) {
			return earlierOf(retry, at)
		}
	}
	return retry
}

// nextPools returns the pools for the library. They are the last pools if the wanted ones must wait
// for the detection of features.
func (s *schedule) nextPools() *resourceslice.DriverResources {
	if s.waitsForFeatures() {
		return s.last
	}
	return s.wanted
}

// needsEarlier reports whether the division of the devices depends on the pools of an earlier agent,
// which were not read yet: before the first publication, if several slices of a pool have devices.
// Slices with devices are the last ones.
func (s *schedule) needsEarlier(given *resourceslice.DriverResources) bool {
	if s.last != nil || s.earlier != nil {
		return false
	}
	for _, pool := range given.Pools {
		if n := len(pool.Slices); n > 1 && len(pool.Slices[n-2].Devices) > 0 {
			return true
		}
	}
	return false
}

// recordDetection stores the result of a detection. The next detection is due after the duration
// again.
func (s *schedule) recordDetection(err error, now time.Time, again time.Duration) {
	said := err == nil || IsRejection(err) && (s.featuresKnown || now.Sub(s.startTime) >= refusalPause)
	s.featuresKnown, s.featuresConfirmed, s.nextDetection = s.featuresKnown || said, said && s.isUnpublished(), now.Add(again)
	if said {
		s.retryDetection, s.retryPause = time.Time{}, backoff.NewPause()
		return
	}
	s.retryDetection = now.Add(s.retryPause.Step())
}

// earlierOf returns the earlier of two times. A zero time means none.
func earlierOf(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// adopt replaces the last pools by equal ones, whose devices are also the library's.
func (s *schedule) adopt(equal *resourceslice.DriverResources) {
	for _, pools := range []**resourceslice.DriverResources{&s.wanted, &s.lastBeside} {
		if *pools == s.last {
			*pools = equal
		}
	}
	s.last = equal
}

// sameInput reports whether two inputs make the same pools, if the pools published last are the same.
func sameInput(a, b pool.Input) bool {
	return a.Snapshot == b.Snapshot && maps.Equal(a.Withheld, b.Withheld) && slices.Equal(a.Claims, b.Claims) &&
		a.Features == b.Features && maps.Equal(a.ExcusedHealth, b.ExcusedHealth) && maps.Equal(a.Returning, b.Returning) && a.GoneEffect == b.GoneEffect
}
