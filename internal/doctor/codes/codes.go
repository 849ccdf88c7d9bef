// Package codes lists the faults that doctor detects: their codes, with causes and the commands that
// fix them. It generates the pages of the codes. It checks nothing; see package doctor.
package codes

import (
	"slices"
	"strings"

	"chandler.dev/discovery"
)

// Code is a fault that doctor can detect. The meaning of a code never changes, and a retired
// code is never reused.
type Code struct {
	ID       string
	Says     string // a short description that fits any host
	Result   Result
	Symptoms []Symptom // the symptoms that users see

	Looks string // the check
	Comes string // the causes
	Why   string // the consequences
	Fixes []Fix
}

// Fix is a command that repairs a fault. Words in capitals are placeholders.
type Fix struct {
	Command string
	Does    string
}

// Category returns the category of the code.
func (c Code) Category() Category {
	for _, category := range allCategories {
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

// Lookup returns the code with an ID, ignoring case.
func Lookup(id string) (Code, bool) {
	codes := Codes()
	i := slices.IndexFunc(codes, func(c Code) bool { return strings.EqualFold(c.ID, id) })
	if i < 0 {
		return Code{}, false
	}
	return codes[i], true
}

// conditionCodes maps the conditions of unhealthy devices to codes.
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

// CodeOf returns the code of a device's condition, or "" for a healthy device.
func CodeOf(condition discovery.Condition) string { return conditionCodes[condition] }

// Symptom is an effect of faults as seen by a user who has not found the cause yet.
type Symptom string

// The symptoms.
const (
	ClaimPending   Symptom = "A pod with a ResourceClaim stays Pending"
	LimitsPending  Symptom = "A pod that requests a device with limits stays Pending"
	Creating       Symptom = "A pod stays in ContainerCreating, or its ResourceClaim is not prepared"
	WithoutDevice  Symptom = "A container starts without its device, or cannot open it"
	GivenTwice     Symptom = "Two pods use the same device"
	DeviceMissing  Symptom = "A device is not offered, or is missing from the node"
	DeviceSlow     Symptom = "A device is slow, or fails under load"
	Terminating    Symptom = "A pod stays in Terminating, or a device does not become free"
	AgentDown      Symptom = "The agent does not start, or does not become ready"
	NoEffect       Symptom = "A configuration change has no effect"
	AfterARestart  Symptom = "Problems after an upgrade, a restart or a reboot"
	WrongEverybody Symptom = "No pods start on a node, with or without devices"
)

// Symptoms returns all symptoms.
func Symptoms() []Symptom {
	return []Symptom{
		ClaimPending, LimitsPending, Creating, WithoutDevice, GivenTwice, DeviceMissing, DeviceSlow,
		Terminating, AgentDown, NoEffect, AfterARestart, WrongEverybody,
	}
}
