package podevents

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
)

// The reasons of Events.
const (
	ReasonUnhealthy = "DeviceUnhealthy"
	ReasonUnknown   = "DeviceUnknown" // the device cannot be read
	ReasonGone      = "DeviceGone"    // the device is missing, or was replaced by another device
	ReasonRecovered = "DeviceRecovered"

	ReasonConfig = "ConfigurationInvalid" // for an agent's pod
	ReasonLabel  = "NodeNotDrained"       // for an agent's pod
)

// The limits of the API server (pkg/apis/core/validation/events.go), and the limit for names.
const (
	maxNote     = 1024
	maxInstance = 128
	maxName     = 253
)

// Device is a device with its health and its consumers. Consecutive Devices may have the same
// name and different health, for different consumers. If several apply to a pod, the first is
// used.
type Device struct {
	Name   string
	Model  string // "" if unknown
	Health discovery.Health

	// Claims are the claims with the device, which any number of pods may reference. Pods are the
	// pods with the device by the device plugin API.
	Claims []types.NamespacedName
	Pods   []types.NamespacedName
}

// Pod is a pod of the node that has not terminated.
type Pod struct {
	types.NamespacedName
	UID    types.UID
	Claims []string // the names of the claims that the pod references
}

// has reports whether the device is allocated to the pod. A claim that is prepared on the node
// provides its devices to every pod that references the claim, whether the claim is reserved
// for the pod or for the pod's group: the pod's status names both (k8s.io/api/core/v1,
// PodResourceClaimStatus).
func (p *Pod) has(d *Device) bool {
	return slices.Contains(d.Pods, p.NamespacedName) || slices.ContainsFunc(d.Claims, func(claim types.NamespacedName) bool {
		return claim.Namespace == p.Namespace && slices.Contains(p.Claims, claim.Name)
	})
}

// hasAmong reports whether a device with the name at the end of devices is allocated to the
// pod.
func (p *Pod) hasAmong(devices []Device, name string) bool {
	for _, d := range slices.Backward(devices) {
		if d.Name != name {
			return false
		}
		if p.has(&d) {
			return true
		}
	}
	return false
}

// key identifies a device of a pod.
type key struct {
	pod    types.UID
	device string
}

// state is a reported state of a device: the condition and its start.
type state struct {
	condition discovery.Condition
	since     int64 // Unix time in seconds
}

// notice is a pending message to a pod about a device.
type notice struct {
	pod    *Pod
	device *Device
	state  state // the state of the device, or its last state before recovery
}

func (n *notice) key() key { return key{n.pod.UID, n.device.Name} }

// dueNotices returns the notices that pods have not received yet: one for each state of an unusable
// device, and one for its recovery. The result depends on the arguments only.
func dueNotices(told map[key]state, devices []Device, pods []Pod, now time.Time) (notices []notice) {
	for i := range devices {
		d := &devices[i]
		for j := range pods {
			n := notice{pod: &pods[j], device: d}
			before, was := told[n.key()]
			switch {
			case !n.pod.has(d) || n.pod.hasAmong(devices[:i], d.Name):
			case d.Health.IsUsable() && was:
				n.state = before
				notices = append(notices, n)
			case !d.Health.IsUsable():
				n.state = stateOf(d.Health, before, now)
				if !was || n.state != before {
					notices = append(notices, n)
				}
			}
		}
	}
	return notices
}

// stateOf returns the state for a device's health. If the start is unknown, as for a missing
// device, the state starts with the first notice.
func stateOf(health discovery.Health, before state, now time.Time) state {
	s := state{condition: health.Key(), since: health.Since.Unix()}
	if health.Since.IsZero() {
		s.since = now.Unix()
		if before.condition == s.condition {
			s.since = before.since
		}
	}
	return s
}

// newEvent returns the Event for a notice. Equal notices have Events with equal names, so a
// notice is never delivered twice, even if a response of the API server was lost.
func (n *notice) newEvent(node string, now time.Time) *eventsv1.Event {
	reason, note := n.eventText()
	kind := corev1.EventTypeWarning
	if n.device.Health.IsUsable() {
		kind = corev1.EventTypeNormal
	}
	told := fmt.Sprintf("%s %s %d %s", n.device.Name, n.state.condition, n.state.since, kind)
	event := eventOf(n.pod, told, note, node, now)
	event.Action, event.Reason, event.Type = "CheckHealth", reason, kind
	return event
}

// eventOf returns an Event about a pod. told determines the Event's name.
func eventOf(pod *Pod, told, note, node string, now time.Time) *eventsv1.Event {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s", pod.UID, told))
	suffix := "." + hex.EncodeToString(sum[:8])
	return &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace,
			Name:      strings.TrimRight(cut(pod.Name, maxName-len(suffix)), "-.") + suffix,
		},
		EventTime:           metav1.NewMicroTime(now),
		ReportingController: discovery.Domain,
		ReportingInstance:   cut(node, maxInstance),
		Note:                cut(strings.ToValidUTF8(note, "?"), maxNote),
		Regarding:           corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
	}
}

// eventText returns the reason and the note of an Event.
func (n *notice) eventText() (reason, note string) {
	name := "Device " + n.device.Name
	if n.device.Model != "" {
		name += " (" + n.device.Model + ")"
	}
	h := n.device.Health
	why := cmp.Or(h.Reason, string(h.Key()))
	switch {
	case h.IsUsable() && h.Key() != "":
		return ReasonRecovered, fmt.Sprintf("%s can be used again; %s: %s", name, h.Key(), why)
	case h.IsUsable():
		return ReasonRecovered, name + " can be used again"
	case h.Key() == discovery.ConditionGone && why != discovery.GoneHealth(h.Effect).Reason:
		return ReasonGone, fmt.Sprintf("%s is gone: %s", name, why)
	case h.Key() == discovery.ConditionGone:
		return ReasonGone, name + " is gone"
	case h.Status == discovery.Unknown:
		return ReasonUnknown, fmt.Sprintf("%s cannot be read: %s", name, why)
	}
	return ReasonUnhealthy, fmt.Sprintf("%s is unhealthy (%s): %s", name, h.Key(), why)
}

// cut returns the longest prefix of s with whole characters and no more than most bytes.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}
