package scan

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/discovery"
)

// The defaults of a [Settler]'s durations.
const (
	defaultUnknownAfter   = 30 * time.Second
	defaultRecoverAfter   = 10 * time.Second
	defaultRecoverAtLast  = 5 * time.Minute
	defaultFlappingWithin = 10 * time.Minute
)

// maxFlaps is the maximum that is counted. The time to recover reaches its limit before.
const maxFlaps = 10

// Settler turns the readings of successive scans into the published states of devices. It reads
// neither the clock nor the host. The zero value has the documented durations.
//
//   - An unreadable device keeps its state for UnknownAfter, 30 s, and is Unknown afterwards.
//     A device that was never read is Unknown at once.
//   - A worse state applies at once. A better state applies when no reading was as bad as the
//     current state for RecoverAfter, 10 s. That time doubles, up to RecoverAtLast, 5 min, each
//     time that the state becomes worse within FlappingWithin, 10 min, of the last time.
//   - Administrators often create, bind, unbind and remove free devices on purpose. If a device
//     has been free since it lost its driver or its node, or since it was found and was not
//     readable yet, it recovers at once, and the missing driver or node does not count as
//     becoming worse.
//   - A missing device has been gone since the first scan without the device. If it was
//     allocated meanwhile, gone is a state like others and ends like them. Free devices are often
//     removed on purpose, such as partitions in favor of a whole device: when such a device
//     returns, it has its previous state at once.
//   - A device counts as unreadable, not as gone, if its whole physical device is missing because
//     the physical device, its family or a list of devices could not be read.
//   - The state of a missing device is kept while the device is allocated, and for
//     FlappingWithin afterwards, unless other hardware takes its place.
//
// Severity decides which of two states is worse.
type Settler struct {
	Severity       discovery.Severity
	UnknownAfter   time.Duration
	RecoverAfter   time.Duration
	RecoverAtLast  time.Duration
	FlappingWithin time.Duration

	// IsHeld reports whether the device is allocated; nil means that no device is.
	IsHeld func(device string) bool

	states map[string]*state // by device
}

// state is the history of one device.
type state struct {
	Identity        string                 `json:"identity,omitempty"`
	Family          string                 `json:"family,omitempty"`
	Silicon         string                 `json:"silicon,omitempty"`
	Status          discovery.HealthStatus `json:"status"`
	Condition       discovery.Condition    `json:"condition,omitempty"`
	Reason          string                 `json:"reason,omitempty"`
	Since           metav1.Time            `json:"since"`
	Worsened        metav1.Time            `json:"worsened,omitzero"` // time of the last change to a worse state
	Flaps           int                    `json:"flaps,omitempty"`   // number of changes to a worse state, each within FlappingWithin of the previous change
	EffectiveAtOnce bool                   `json:"made,omitempty"`    // the device is being created or removed, and has been free since

	Missing metav1.Time `json:"missing,omitzero"` // start of the absence, zero for a present device
	Missed  bool        `json:"missed,omitempty"` // the device was allocated while it was missing

	// unread and better are the start of readings that are Unknown or better than the state.
	// unheld is the time since when the missing device is free. A restart resets all three.
	unread, better, unheld time.Time
}

// SettleStates returns the snapshot with the states of its devices. again is the time after which a
// state may change even though the readings stay the same, or 0. The caller should scan the host
// then.
func (s *Settler) SettleStates(snapshot *discovery.Snapshot, now time.Time) (settled *discovery.Snapshot, again time.Duration) {
	settled = &discovery.Snapshot{Devices: slices.Clone(snapshot.Devices), Problems: snapshot.Problems}
	present, silicon := make(map[string]bool, len(settled.Devices)), make(map[string]bool)
	for i := range settled.Devices {
		d := &settled.Devices[i]
		present[d.Name], silicon[d.Silicon()] = true, true
		again = soonerOf(again, s.settleDevice(d, now))
	}
	causes := causesOf(snapshot.Problems)
	settled.Gone = make(discovery.Missing)
	maps.DeleteFunc(s.states, func(name string, st *state) bool {
		if present[name] {
			return false
		}
		cause := cmp.Or(causes[name], causes[st.Silicon], causes[st.Family], causes[anyList])
		if cause != nil && st.Missing.IsZero() && !silicon[st.Silicon] {
			health, wait := s.judgeReading(st, discovery.Health{Status: discovery.Unknown, Reason: cause.Error()}, now)
			settled.Gone[name], again = health, soonerOf(again, wait)
			return false
		}
		s.recordMissing(st, s.isHeld(name), now)
		settled.Gone[name] = s.goneHealth(st)
		return !st.unheld.IsZero() && now.Sub(st.unheld) >= or(s.FlappingWithin, defaultFlappingWithin)
	})
	return settled, again
}

// settleDevice sets the state of the device, and returns the time after which the state may change.
func (s *Settler) settleDevice(d *discovery.Device, now time.Time) (wait time.Duration) {
	reading := worstReading(s.Severity, d)
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
	st.EffectiveAtOnce = st.isMade(reading) && !s.isHeld(d.Name)
	if d.Health, wait = s.judgeReading(st, reading, now); d.Health.Reason == reading.Reason {
		d.Health.Fix, d.Health.Setting, d.Health.Resetting = reading.Fix, reading.Setting, reading.Resetting
		d.Health.OtherFunction, d.Health.MissingNode = reading.OtherFunction, reading.MissingNode
	}
	return wait
}

// isMade reports whether a reading fits a device during its creation or removal: the device lacks
// its driver or a node, or was never readable, and had no other fault before. isMade also reports
// true for the next good reading.
func (st *state) isMade(reading discovery.Health) bool {
	wasWell := st.EffectiveAtOnce || st.Status == "" || st.Status == discovery.Healthy
	switch reading.Key() {
	case "":
		return st.EffectiveAtOnce
	case discovery.ConditionDriverUnbound, discovery.ConditionNodeMissing:
		return wasWell
	case discovery.ConditionUnknown:
		return st.Status == "" || st.EffectiveAtOnce && st.Status != discovery.Healthy
	}
	return false
}

// isHeld reports whether the device is allocated.
func (s *Settler) isHeld(device string) bool { return s.IsHeld != nil && s.IsHeld(device) }

// judgeReading returns the health of a device after a reading, and the time until a possible change
// of the health.
func (s *Settler) judgeReading(st *state, reading discovery.Health, now time.Time) (health discovery.Health, wait time.Duration) {
	if wait = s.wait(st, reading, now); wait == 0 {
		s.setState(st, reading, now)
	}
	if st.Since.After(now) {
		st.Since = seconds(now) // the clock was set back
	}
	health = st.currentHealth()
	health.Since = st.Since
	health.Stale = wait > 0 && reading.Status == discovery.Unknown
	if key := health.Key(); key != "" {
		health.Effect = s.Severity.EffectOf(key)
	}
	return health, wait
}

// soonerOf returns the shorter of two waiting times, where 0 means no limit.
func soonerOf(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// goneHealth returns the health of a missing device.
func (s *Settler) goneHealth(st *state) discovery.Health {
	h := discovery.GoneHealth(s.Severity.EffectOf(discovery.ConditionGone))
	h.Since = st.Missing
	if st.currentHealth().Key() == discovery.ConditionGone {
		h.Since = st.Since // the device was present for less than the time to recover
	}
	return h
}

// recordMissing records that the device is missing.
func (s *Settler) recordMissing(st *state, held bool, now time.Time) {
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

// back records that the device is present again. If it was allocated meanwhile, and its state is
// better than gone, its state becomes gone, and recovers from gone.
func (s *Settler) back(st *state) {
	gone := s.goneHealth(st)
	gone.Reason = "the device was gone until just now"
	st.EffectiveAtOnce = st.EffectiveAtOnce && !st.Missed
	if st.Missed && level(s.Severity, gone) > level(s.Severity, st.currentHealth()) {
		s.setState(st, gone, st.Missing.Time)
	}
	st.Missing, st.Missed, st.unheld = metav1.Time{}, false, time.Time{}
}

// wait returns how long the state is kept if the reading does not change.
func (s *Settler) wait(st *state, reading discovery.Health, now time.Time) time.Duration {
	known := st.Status != "" && st.Status != discovery.Unknown
	if reading.Status == discovery.Unknown {
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
	if st.Status == "" || level(s.Severity, reading) >= level(s.Severity, st.currentHealth()) {
		st.better = time.Time{}
		return 0
	}
	if st.EffectiveAtOnce {
		return 0
	}
	if st.better.IsZero() {
		st.better = now
	}
	hold := min(or(s.RecoverAfter, defaultRecoverAfter)<<st.Flaps, or(s.RecoverAtLast, defaultRecoverAtLast))
	return max(0, hold-now.Sub(st.better))
}

// setState makes the reading the state. A different reason alone does not change the state.
func (s *Settler) setState(st *state, reading discovery.Health, now time.Time) {
	before := st.currentHealth()
	if st.Status != "" && !st.EffectiveAtOnce && level(s.Severity, reading) > level(s.Severity, before) {
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
		st.Status = discovery.Healthy
	}
	st.EffectiveAtOnce = st.EffectiveAtOnce && st.Status != discovery.Healthy
}

func (st *state) currentHealth() discovery.Health {
	return discovery.Health{Status: st.Status, Condition: st.Condition, Reason: st.Reason}
}

// seconds truncates a time to the stored precision.
func seconds(t time.Time) metav1.Time { return metav1.Time{Time: t.UTC().Truncate(time.Second)} }

func or(set, otherwise time.Duration) time.Duration {
	if set > 0 {
		return set
	}
	return otherwise
}

// MarshalJSON writes the states, so that another Settler can continue with them.
func (s *Settler) MarshalJSON() ([]byte, error) { return json.Marshal(s.states) }

// UnmarshalJSON reads states that MarshalJSON wrote. If any state is invalid, it reads none.
func (s *Settler) UnmarshalJSON(data []byte) error {
	var states map[string]*state
	if err := json.Unmarshal(data, &states); err != nil {
		return fmt.Errorf("states of devices: %w", err)
	}
	for name, st := range states {
		switch {
		case st == nil || st.Status != discovery.Healthy && st.Status != discovery.Unhealthy && st.Status != discovery.Unknown:
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

// level orders states by severity. A worse state has a higher level.
func level(s discovery.Severity, h discovery.Health) int {
	if h.Key() == "" {
		return 0
	}
	effects := []resourceapi.DeviceTaintEffect{resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute}
	return 1 + slices.Index(effects, s.EffectOf(h.Key()))
}

// worstReading returns the worst reading of a device, or the first of several equally bad readings.
func worstReading(s discovery.Severity, d *discovery.Device) discovery.Health {
	worst := d.Health
	for _, reading := range d.Readings {
		if level(s, reading) > level(s, worst) {
			worst = reading
		}
	}
	return worst
}
