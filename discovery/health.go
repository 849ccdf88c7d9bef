package discovery

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Health is a reading of a device's state at the time of the scan, and after a
// [Settler] the state that the device is said to be in.
type Health struct {
	Status    HealthStatus `json:"status"`
	Condition Condition    `json:"condition,omitempty"` // what is wrong, by a name; see [Health.Key]
	Reason    string       `json:"reason,omitempty"`    // in words, "" while healthy

	// Setting says that the device is set up so that it cannot be used, and that nothing is broken: a reset does not help.
	Setting bool `json:"-"`

	// Since is when the state began, in whole seconds, and Effect what it means
	// for those who would have the device. Stale says that the last scan could
	// not read it, and that this is what was known before. They are set by
	// [Settler], never by a family.
	Since  metav1.Time                   `json:"-"`
	Effect resourceapi.DeviceTaintEffect `json:"-"`
	Stale  bool                          `json:"-"`
}

// HealthStatus says whether a device can be used.
type HealthStatus string

// The states of a device. The zero value counts as Healthy.
const (
	Healthy   HealthStatus = "Healthy"
	Unhealthy HealthStatus = "Unhealthy" // known not to work
	Unknown   HealthStatus = "Unknown"   // could not be read; what is said of it may be out of date
)

// Condition names what is wrong with a device: the part of a taint's key behind
// "chandler.dev/", and what the administrator sets a severity for.
type Condition string

// The conditions.
const (
	ConditionUnhealthy       Condition = "unhealthy"        // what its family finds and has no other name
	ConditionUnknown         Condition = "unknown"          // could not be read for a while
	ConditionGone            Condition = "gone"             // not there any more, but held by a claim
	ConditionDriverUnbound   Condition = "driver-unbound"   // no kernel driver is bound to it
	ConditionNodeMissing     Condition = "node-missing"     // a device node of it is not in /dev
	ConditionNotResponding   Condition = "not-responding"   // the bus says that it is there, and it does not answer
	ConditionOverTemperature Condition = "over-temperature" // as hot as its critical limit
	ConditionLinkDegraded    Condition = "link-degraded"    // its PCIe link is less than both ends can do
	ConditionFatalErrors     Condition = "fatal-errors"     // it, or its link, has had fatal PCIe errors since it was found
)

// Conditions returns all of them.
func Conditions() []Condition {
	return []Condition{
		ConditionUnhealthy, ConditionUnknown, ConditionGone, ConditionDriverUnbound,
		ConditionNodeMissing, ConditionNotResponding, ConditionOverTemperature, ConditionLinkDegraded, ConditionFatalErrors,
	}
}

// Gone returns the health of a device that somebody has and that is not there any
// more, by what the administrator wants that to mean.
func Gone(effect resourceapi.DeviceTaintEffect) Health {
	return Health{Status: Unhealthy, Condition: ConditionGone, Reason: "the device is gone", Effect: effect}
}

// Missing is the health of devices that are not there any more, by name.
type Missing map[string]Health

// Health returns the health of a device that is not there. If it is not known
// since when, the effect is what the administrator wants that to mean.
func (m Missing) Health(device string, effect resourceapi.DeviceTaintEffect) Health {
	if health, known := m[device]; known {
		return health
	}
	return Gone(effect)
}

// Key returns the condition, "" of a healthy device. One that has no other name
// is by the status.
func (h Health) Key() Condition {
	switch {
	case h.Status == Unknown:
		return ConditionUnknown
	case h.Status != Unhealthy:
		return ""
	case h.Condition == "":
		return ConditionUnhealthy
	}
	return h.Condition
}

// Usable reports whether a new pod may be given the device. A
// condition that the administrator only wants to hear of keeps nobody from it.
func (h Health) Usable() bool {
	return h.Key() == "" || h.Effect == resourceapi.DeviceTaintEffectNone
}

// Severity is what the administrator wants conditions to mean. Those that it
// does not name mean NoSchedule, or None where they need not hurt: a link that
// is slower than it could be, and errors of the past.
type Severity map[Condition]resourceapi.DeviceTaintEffect

// Effect returns what a condition means.
func (s Severity) Effect(c Condition) resourceapi.DeviceTaintEffect {
	if effect, set := s[c]; set {
		return effect
	}
	if c == ConditionLinkDegraded || c == ConditionFatalErrors {
		return resourceapi.DeviceTaintEffectNone
	}
	return resourceapi.DeviceTaintEffectNoSchedule
}

// level orders states, the worse the higher.
func (s Severity) level(h Health) int {
	if h.Key() == "" {
		return 0
	}
	effects := []resourceapi.DeviceTaintEffect{resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute}
	return 1 + slices.Index(effects, s.Effect(h.Key()))
}

// worst returns the worst of what was read of a device, the first of several
// that are as bad.
func (s Severity) worst(d *Device) Health {
	worst := d.Health
	for _, reading := range d.Readings {
		if s.level(reading) > s.level(worst) {
			worst = reading
		}
	}
	return worst
}
