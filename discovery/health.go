package discovery

import (
	"cmp"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Health is a reading of a device's state at the time of the scan. After the Settler of package
// scan, Health is the published state of the device.
type Health struct {
	Status    HealthStatus `json:"status"`
	Condition Condition    `json:"condition,omitempty"` // name of the fault; see [Health.Key]
	Reason    string       `json:"reason,omitempty"`    // description of the fault, "" while healthy

	// Fix is the shell command that makes the device usable, or a command to examine the fault
	// with a remark about the repair, if a reset of the device does not help: the host's
	// configuration makes the device unusable, or the fault is in another device.
	Fix string `json:"-"`

	// Resetting is set while the driver resets the device.
	Resetting bool `json:"-"`

	// OtherFunction is the address of the PCI function whose driver makes the device unusable, ""
	// if the fault is in the device itself.
	OtherFunction string `json:"-"`

	// MissingNode is the path of the device node that a device lacks, "" if the device has its nodes,
	// or if the path is unknown.
	MissingNode string `json:"-"`

	// Setting is the change of the DriverConfig that makes the device usable, such as "set
	// driverRoots.vpu to /var/tmp".
	Setting string `json:"-"`

	// Since is the start of the state, in whole seconds, and Effect is the effect of the state
	// on scheduling. Stale is set if the last scan could not read the device and Health is its
	// previous state. The Settler of package scan sets these fields; a family never does.
	Since  metav1.Time                   `json:"-"`
	Effect resourceapi.DeviceTaintEffect `json:"-"`
	Stale  bool                          `json:"-"`
}

// HealthStatus reports whether a device can be used.
type HealthStatus string

// The states of a device. The zero value means Healthy.
const (
	Healthy   HealthStatus = "Healthy"
	Unhealthy HealthStatus = "Unhealthy" // a fault was found
	Unknown   HealthStatus = "Unknown"   // unreadable; the description of the device may be out of date
)

// Condition names a fault of a device. Condition is the part of a taint's key after
// "chandler.dev/", and the key of a configured severity.
type Condition string

// The conditions.
const (
	ConditionUnhealthy       Condition = "unhealthy"        // a fault without a name of its own, found by the family
	ConditionUnknown         Condition = "unknown"          // unreadable for a while
	ConditionGone            Condition = "gone"             // removed from the host while a claim has it
	ConditionDriverUnbound   Condition = "driver-unbound"   // no kernel driver is bound to it
	ConditionNodeMissing     Condition = "node-missing"     // a device node is missing in /dev
	ConditionNotResponding   Condition = "not-responding"   // present on the bus, but does not respond
	ConditionOverTemperature Condition = "over-temperature" // as hot as its critical limit
	ConditionLinkDegraded    Condition = "link-degraded"    // its PCIe link is narrower or slower than both ends support
	ConditionFatalErrors     Condition = "fatal-errors"     // the device or its link has had fatal PCIe errors since the device was found
)

// Conditions returns all conditions.
func Conditions() []Condition {
	return []Condition{
		ConditionUnhealthy, ConditionUnknown, ConditionGone, ConditionDriverUnbound,
		ConditionNodeMissing, ConditionNotResponding, ConditionOverTemperature, ConditionLinkDegraded, ConditionFatalErrors,
	}
}

// GoneHealth returns the health of an allocated device after its removal from the host, with the
// configured effect.
func GoneHealth(effect resourceapi.DeviceTaintEffect) Health {
	return Health{Status: Unhealthy, Condition: ConditionGone, Reason: "the device is gone", Effect: effect}
}

// MissingNodeHealth returns the health of a device whose device node is missing.
func MissingNodeHealth(path string) Health {
	return Health{Status: Unhealthy, Condition: ConditionNodeMissing, Reason: "device node " + path + " is missing", MissingNode: path}
}

// Missing is the health of removed devices, by name.
type Missing map[string]Health

// HealthOf returns the health of a removed device. For a device missing from m, the start is unset
// and the effect is the argument.
func (m Missing) HealthOf(device string, effect resourceapi.DeviceTaintEffect) Health {
	if health, known := m[device]; known {
		return health
	}
	return GoneHealth(effect)
}

// Key returns the condition, or "" for a healthy device. If the family set no condition, Key
// derives the condition from the status.
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

// IsUsable reports whether the device may be allocated to a new pod. A condition with the effect
// None does not prevent an allocation. Until the effect is known, the default applies.
func (h Health) IsUsable() bool {
	return h.Key() == "" || cmp.Or(h.Effect, Severity{}.EffectOf(h.Key())) == resourceapi.DeviceTaintEffectNone
}

// Severity maps conditions to the configured effects. The default is NoSchedule, except for a
// degraded link and fatal errors of the past. They may be harmless, so their default is None.
type Severity map[Condition]resourceapi.DeviceTaintEffect

// EffectOf returns the effect of a condition.
func (s Severity) EffectOf(c Condition) resourceapi.DeviceTaintEffect {
	if effect, set := s[c]; set {
		return effect
	}
	if c == ConditionLinkDegraded || c == ConditionFatalErrors {
		return resourceapi.DeviceTaintEffectNone
	}
	return resourceapi.DeviceTaintEffectNoSchedule
}
