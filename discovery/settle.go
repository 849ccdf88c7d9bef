package discovery

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// The times of a [Settler] that are not set.
const (
	defaultUnknownAfter   = 30 * time.Second
	defaultRecoverAfter   = 10 * time.Second
	defaultRecoverAtLast  = 5 * time.Minute
	defaultFlappingWithin = 10 * time.Minute
)

// maxFlaps is how many of them are counted. The time to recover has long been
// the longest by then.
const maxFlaps = 10

// Settler turns what was read of devices, scan after scan, into the states that
// are said of them. It reads no clock and no host. The zero value has the times
// of the documentation.
//
//   - A device that cannot be read keeps its state for UnknownAfter, 30 s, and
//     is Unknown then. One that was never read is so at once.
//   - A worse state holds at once. A better one does when no reading of
//     RecoverAfter, 10 s, was as bad. That time doubles, up to RecoverAtLast,
//     5 min, each time that the state becomes worse within FlappingWithin,
//     10 min, of the last time.
//   - A device that nobody has is often made, bound, unbound and taken away on
//     purpose. If nobody has had it since it lost its driver or its node, or since
//     it was found and could not be read yet, then it is better at once, and what
//     it lacked does not count as becoming worse.
//   - A device that is missing is gone since then. If somebody had it meanwhile,
//     being gone was a state like others, and ends like them. A device that
//     nobody has is often taken away on purpose, as parts are for a whole: when it
//     returns, it is at once as it was before.
//   - A device is not gone, but cannot be read, if nothing of its silicon is there
//     because the silicon, its family or a list of devices could not be read.
//   - The state of a device that is missing is kept while somebody has it,
//     and for FlappingWithin then, unless other hardware takes its place.
//
// Of two states the worse is the one to which Severity gives the worse effect.
type Settler struct {
	Severity       Severity
	UnknownAfter   time.Duration
	RecoverAfter   time.Duration
	RecoverAtLast  time.Duration
	FlappingWithin time.Duration

	// Held reports whether somebody has the device; nil means that nobody has any.
	Held func(device string) bool

	states map[string]*state // by device
}

// state is what is known of one device over time.
type state struct {
	Identity  string       `json:"identity,omitempty"`
	Family    string       `json:"family,omitempty"`
	Silicon   string       `json:"silicon,omitempty"`
	Status    HealthStatus `json:"status"`
	Condition Condition    `json:"condition,omitempty"`
	Reason    string       `json:"reason,omitempty"`
	Since     metav1.Time  `json:"since"`
	Worsened  metav1.Time  `json:"worsened,omitzero"` // when it last became worse
	Flaps     int          `json:"flaps,omitempty"`   // how often it did so before, each time soon after the last
	Made      bool         `json:"made,omitempty"`    // it is being made or taken apart, and nobody has had it since

	Missing metav1.Time `json:"missing,omitzero"` // since when, zero of a device that is there
	Missed  bool        `json:"missed,omitempty"` // somebody had it while it was missing

	// Since when readings are Unknown or better than the state, and since when
	// nobody has the device that is missing. After a restart these begin anew.
	unread, better, unheld time.Time
}

// Settle returns the snapshot with the states of its devices, and after which
// time one may change although what is read stays the same, 0 if none does. The
// host should be scanned then.
func (s *Settler) Settle(snapshot *Snapshot, now time.Time) (settled *Snapshot, again time.Duration) {
	settled = &Snapshot{Devices: slices.Clone(snapshot.Devices), Problems: snapshot.Problems}
	present, silicon := make(map[string]bool, len(settled.Devices)), make(map[string]bool)
	for i := range settled.Devices {
		d := &settled.Devices[i]
		present[d.Name], silicon[d.Silicon()] = true, true
		again = sooner(again, s.settle(d, now))
	}
	causes := causesOf(snapshot.Problems)
	settled.Gone = make(Missing)
	maps.DeleteFunc(s.states, func(name string, st *state) bool {
		if present[name] {
			return false
		}
		cause := cmp.Or(causes[name], causes[st.Silicon], causes[st.Family], causes[anyList])
		if cause != nil && st.Missing.IsZero() && !silicon[st.Silicon] {
			health, wait := s.say(st, Health{Status: Unknown, Reason: cause.Error()}, now)
			settled.Gone[name], again = health, sooner(again, wait)
			return false
		}
		s.miss(st, s.held(name), now)
		settled.Gone[name] = s.gone(st)
		return !st.unheld.IsZero() && now.Sub(st.unheld) >= or(s.FlappingWithin, defaultFlappingWithin)
	})
	return settled, again
}

// settle gives the device its state, and returns after which time that may
// change.
func (s *Settler) settle(d *Device, now time.Time) (wait time.Duration) {
	reading := s.Severity.worst(d)
	st := s.states[d.Name]
	if st == nil || st.Identity != "" && d.Identity != "" && st.Identity != d.Identity {
		st = &state{}
		if s.states == nil {
			s.states = make(map[string]*state)
		}
		s.states[d.Name] = st
	}
	if d.Identity != "" {
		st.Identity = d.Identity
	}
	st.Family, st.Silicon = d.Family, d.Silicon()
	if !st.Missing.IsZero() {
		s.back(st)
	}
	st.Made = st.isMade(reading) && !s.held(d.Name)
	d.Health, wait = s.say(st, reading, now)
	return wait
}

// isMade reports whether a reading is of a device that may be in the making, or is
// being taken apart: it lacks its driver or a node, or could never be read, and
// nothing else was wrong with it before; or whether it just was.
func (st *state) isMade(reading Health) bool {
	wasWell := st.Made || st.Status == "" || st.Status == Healthy
	switch reading.Key() {
	case "":
		return st.Made
	case ConditionDriverUnbound, ConditionNodeMissing:
		return wasWell
	case ConditionUnknown:
		return st.Status == "" || st.Made && st.Status != Healthy
	}
	return false
}

// held reports whether somebody has the device.
func (s *Settler) held(device string) bool { return s.Held != nil && s.Held(device) }

// say returns the health of a device by what was read of it, and after which time
// that may change.
func (s *Settler) say(st *state, reading Health, now time.Time) (health Health, wait time.Duration) {
	if wait = s.wait(st, reading, now); wait == 0 {
		s.become(st, reading, now)
	}
	if st.Since.After(now) {
		st.Since = seconds(now) // the clock was set back
	}
	health = st.health()
	health.Since = st.Since
	health.Stale = wait > 0 && reading.Status == Unknown
	if key := health.Key(); key != "" {
		health.Effect = s.Severity.Effect(key)
	}
	return health, wait
}

// sooner returns the shorter of two times to wait, where 0 is for ever.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// gone returns the health of a device that is missing.
func (s *Settler) gone(st *state) Health {
	h := Gone(s.Severity.Effect(ConditionGone))
	h.Since = st.Missing
	if st.health().Key() == ConditionGone {
		h.Since = st.Since // it was back for less time than it has to be
	}
	return h
}

// miss says that the device is missing.
func (s *Settler) miss(st *state, held bool, now time.Time) {
	if st.Missing.IsZero() || st.Missing.After(now) {
		st.Missing = seconds(now)
	}
	st.better, st.unread = time.Time{}, time.Time{}
	switch {
	case held:
		st.Missed, st.unheld = true, time.Time{}
	case st.unheld.IsZero():
		st.unheld = now
	}
}

// back says that the device is not missing any more. If somebody missed it and
// nothing worse is known of it, it recovers from that.
func (s *Settler) back(st *state) {
	gone := s.gone(st)
	gone.Reason = "the device was gone until just now"
	st.Made = st.Made && !st.Missed
	if st.Missed && s.Severity.level(gone) > s.Severity.level(st.health()) {
		s.become(st, gone, st.Missing.Time)
	}
	st.Missing, st.Missed, st.unheld = metav1.Time{}, false, time.Time{}
}

// wait returns for how long the state is kept if the reading stays as it is.
func (s *Settler) wait(st *state, reading Health, now time.Time) time.Duration {
	known := st.Status != "" && st.Status != Unknown
	if reading.Status == Unknown {
		st.better = time.Time{}
		if st.unread.IsZero() {
			st.unread = now
		}
		if !known {
			return 0
		}
		return max(0, or(s.UnknownAfter, defaultUnknownAfter)-now.Sub(st.unread))
	}
	st.unread = time.Time{}
	if st.Status == "" || s.Severity.level(reading) >= s.Severity.level(st.health()) {
		st.better = time.Time{}
		return 0
	}
	if st.Made {
		return 0
	}
	if st.better.IsZero() {
		st.better = now
	}
	hold := min(or(s.RecoverAfter, defaultRecoverAfter)<<st.Flaps, or(s.RecoverAtLast, defaultRecoverAtLast))
	return max(0, hold-now.Sub(st.better))
}

// become makes the reading the state. A different reason alone is no other state.
func (s *Settler) become(st *state, reading Health, now time.Time) {
	before := st.health()
	if st.Status != "" && !st.Made && s.Severity.level(reading) > s.Severity.level(before) {
		if !st.Worsened.IsZero() && now.Sub(st.Worsened.Time) <= or(s.FlappingWithin, defaultFlappingWithin) {
			st.Flaps = min(st.Flaps+1, maxFlaps)
		} else {
			st.Flaps = 0
		}
		st.Worsened = seconds(now)
	}
	if st.Status == "" || before.Key() != reading.Key() {
		st.Since, st.better = seconds(now), time.Time{}
	}
	st.Status, st.Condition, st.Reason = reading.Status, reading.Condition, reading.Reason
	if st.Status == "" {
		st.Status = Healthy
	}
	st.Made = st.Made && st.Status != Healthy
}

func (st *state) health() Health {
	return Health{Status: st.Status, Condition: st.Condition, Reason: st.Reason}
}

// seconds is what is left of a time when it was written down and read again.
func seconds(t time.Time) metav1.Time { return metav1.Time{Time: t.UTC().Truncate(time.Second)} }

func or(set, otherwise time.Duration) time.Duration {
	if set > 0 {
		return set
	}
	return otherwise
}

// MarshalJSON writes the states, for another Settler to go on from.
func (s *Settler) MarshalJSON() ([]byte, error) { return json.Marshal(s.states) }

// UnmarshalJSON takes over states that were written down. If one of them cannot
// be right, it takes none.
func (s *Settler) UnmarshalJSON(data []byte) error {
	var states map[string]*state
	if err := json.Unmarshal(data, &states); err != nil {
		return fmt.Errorf("states of devices: %w", err)
	}
	for name, st := range states {
		switch {
		case st == nil || st.Status != Healthy && st.Status != Unhealthy && st.Status != Unknown:
			return fmt.Errorf("states of devices: %s: no status", name)
		case st.Condition != "" && len(validation.IsDNS1123Label(string(st.Condition))) > 0:
			return fmt.Errorf("states of devices: %s: condition %q: not a name", name, st.Condition)
		case st.Flaps < 0 || st.Flaps > maxFlaps:
			return fmt.Errorf("states of devices: %s: %d flaps", name, st.Flaps)
		}
	}
	s.states = states
	return nil
}
