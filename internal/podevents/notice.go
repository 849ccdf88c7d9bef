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
	ReasonUnknown   = "DeviceUnknown" // it cannot be read
	ReasonGone      = "DeviceGone"    // it is not there any more, or another is in its place
	ReasonRecovered = "DeviceRecovered"

	ReasonConfig = "ConfigurationInvalid" // of the agent's pod
)

// The limits that the API server sets (pkg/apis/core/validation/events.go), and
// that of names.
const (
	maxNote     = 1024
	maxInstance = 128
	maxName     = 253
)

// Device is one that pods have, and how it is. There may be some of one name, one
// after the other, if it is not the same for all: a pod that has it by more than
// one of them is told of the first.
type Device struct {
	Name   string
	Model  string // "" if it is not known
	Health discovery.Health

	// By what pods have it: claims, to which any number of them refer, and pods
	// that the device-plugin API gave it to.
	Claims []types.NamespacedName
	Pods   []types.NamespacedName
}

// Pod is one of the node that has not ended.
type Pod struct {
	types.NamespacedName
	UID    types.UID
	Claims []string // the names of the claims that it refers to
}

// has reports whether the pod has the device. A pod that refers to a claim which
// is prepared on its node has what is allocated to the claim, whether the claim is
// reserved for the pod or for the pod's group: the pod's status names both
// (k8s.io/api/core/v1, PodResourceClaimStatus).
func (p *Pod) has(d *Device) bool {
	return slices.Contains(d.Pods, p.NamespacedName) || slices.ContainsFunc(d.Claims, func(claim types.NamespacedName) bool {
		return claim.Namespace == p.Namespace && slices.Contains(p.Claims, claim.Name)
	})
}

// hasAmong reports whether the pod has one of the name, of which are the last devices.
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

// key is a device that a pod has.
type key struct {
	pod    types.UID
	device string
}

// state is what a pod was told of a device: what is wrong with it, and since
// when that is so.
type state struct {
	condition discovery.Condition
	since     int64 // in seconds, as time.Time.Unix has them
}

// notice is what a pod is to be told of a device.
type notice struct {
	pod    *Pod
	device *Device
	state  state // of the device, or in which it was until it recovered
}

func (n *notice) key() key { return key{n.pod.UID, n.device.Name} }

// due returns what pods are to be told that they were not yet told: of each
// state in which a device cannot be used once, and that it can be used again. It
// is the same for the same arguments.
func due(told map[key]state, devices []Device, pods []Pod, now time.Time) (notices []notice) {
	for i := range devices {
		d := &devices[i]
		for j := range pods {
			n := notice{pod: &pods[j], device: d}
			before, was := told[n.key()]
			switch {
			case !n.pod.has(d) || n.pod.hasAmong(devices[:i], d.Name):
			case d.Health.Usable() && was:
				n.state = before
				notices = append(notices, n)
			case !d.Health.Usable():
				n.state = stateOf(d.Health, before, now)
				if !was || n.state != before {
					notices = append(notices, n)
				}
			}
		}
	}
	return notices
}

// stateOf returns the state that health is of. Where nobody knows since
// when a device is gone, it is since that was told.
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

// event returns what the pod is told. Its name is the same whenever the same is
// told, so that none is told twice whatever becomes of an answer.
func (n *notice) event(node string, now time.Time) *eventsv1.Event {
	reason, note := n.words()
	kind := corev1.EventTypeWarning
	if n.device.Health.Usable() {
		kind = corev1.EventTypeNormal
	}
	told := fmt.Sprintf("%s %s %d %s", n.device.Name, n.state.condition, n.state.since, kind)
	event := eventOf(n.pod, told, note, node, now)
	event.Action, event.Reason, event.Type = "CheckHealth", reason, kind
	return event
}

// eventOf returns an Event of a pod, with a note and a name for what it tells.
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

// words returns the reason and the note of an Event.
func (n *notice) words() (reason, note string) {
	name := "Device " + n.device.Name
	if n.device.Model != "" {
		name += " (" + n.device.Model + ")"
	}
	h := n.device.Health
	why := cmp.Or(h.Reason, string(h.Key()))
	switch {
	case h.Usable() && h.Key() != "":
		return ReasonRecovered, fmt.Sprintf("%s can be used again; %s: %s", name, h.Key(), why)
	case h.Usable():
		return ReasonRecovered, name + " can be used again"
	case h.Key() == discovery.ConditionGone && why != discovery.Gone(h.Effect).Reason:
		return ReasonGone, fmt.Sprintf("%s is gone: %s", name, why)
	case h.Key() == discovery.ConditionGone:
		return ReasonGone, name + " is gone"
	case h.Status == discovery.Unknown:
		return ReasonUnknown, fmt.Sprintf("%s cannot be read: %s", name, why)
	}
	return ReasonUnhealthy, fmt.Sprintf("%s is unhealthy (%s): %s", name, h.Key(), why)
}

// cut returns as many of the first characters as are no more than most bytes.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}
