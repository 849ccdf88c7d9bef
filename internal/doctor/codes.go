package doctor

import (
	"slices"
	"strings"

	"chandler.dev/discovery"
)

// Code is a fault that doctor knows. A code keeps its meaning for ever, and one that is no
// longer used is never used for something else.
type Code struct {
	ID       string
	Says     string // in a few words, of any host
	Result   Result
	Symptoms []Symptom // by which a user meets it

	Looks string // what is looked at
	Comes string // how it comes to be
	Why   string // why it matters
	Fixes []Fix
}

// Fix is a command that mends a fault. Words in capitals stand for names.
type Fix struct {
	Command string
	Does    string
}

// Category returns what the code is about.
func (c Code) Category() Category {
	for _, category := range categories {
		if strings.HasPrefix(c.ID, "CH"+category.digits) {
			return category.Category
		}
	}
	return ""
}

// Codes returns all codes, in order.
func Codes() []Code {
	return slices.Concat(kubeletCodes, runtimeCodes, deviceCodes, hostCodes, apiCodes, clusterCodes, agentCodes)
}

// Lookup returns a code by its ID, in whatever case.
func Lookup(id string) (Code, bool) {
	codes := Codes()
	i := slices.IndexFunc(codes, func(c Code) bool { return strings.EqualFold(c.ID, id) })
	if i < 0 {
		return Code{}, false
	}
	return codes[i], true
}

// conditionCodes are the codes of what may be wrong with a device.
var conditionCodes = map[discovery.Condition]string{
	discovery.ConditionUnhealthy:       "CH0301",
	discovery.ConditionUnknown:         "CH0302",
	discovery.ConditionGone:            "CH0303",
	discovery.ConditionDriverUnbound:   "CH0304",
	discovery.ConditionNodeMissing:     "CH0305",
	discovery.ConditionOverTemperature: "CH0306",
	discovery.ConditionLinkDegraded:    "CH0307",
	discovery.ConditionFatalErrors:     "CH0308",
	discovery.ConditionNotResponding:   "CH0314",
}

// CodeOf returns the code of a condition of a device, "" of a device that is well.
func CodeOf(condition discovery.Condition) string { return conditionCodes[condition] }

// Symptom is how a user meets faults, before knowing which one it is.
type Symptom string

// The symptoms.
const (
	ClaimPending   Symptom = "A pod with a claim stays Pending"
	LimitsPending  Symptom = "A pod with limits stays Pending"
	Creating       Symptom = "A pod stays in ContainerCreating, or its claim is not prepared"
	WithoutDevice  Symptom = "A container starts without its device, or cannot open it"
	GivenTwice     Symptom = "Two pods have one device"
	DeviceMissing  Symptom = "A device is not offered, or is missing from the node"
	DeviceSlow     Symptom = "A device is slow, or fails under load"
	Terminating    Symptom = "A pod stays in Terminating, or a device does not become free"
	AgentDown      Symptom = "The agent does not start, or does not become ready"
	NoEffect       Symptom = "A change of the configuration has no effect"
	AfterARestart  Symptom = "Something is wrong after an upgrade, a restart or a reboot"
	WrongEverybody Symptom = "Nothing works on this node, with or without devices"
)

// Symptoms returns all of them.
func Symptoms() []Symptom {
	return []Symptom{
		ClaimPending, LimitsPending, Creating, WithoutDevice, GivenTwice, DeviceMissing, DeviceSlow,
		Terminating, AgentDown, NoEffect, AfterARestart, WrongEverybody,
	}
}
