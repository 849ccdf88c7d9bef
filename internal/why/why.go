// Package why explains why a pod waits for devices, or which devices it has. It works like the
// scheduler, with the scheduler's code for CEL and for allocation, and counts the devices that each
// condition removes. It is pure: its input are the objects of a cluster.
package why

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"chandler.dev/internal/fleet"
)

// Answer is the explanation for a pod.
type Answer struct {
	Pod              string    `json:"pod"`
	Phase            string    `json:"phase"`
	Since            time.Time `json:"since"` // creation or start of the pod
	Node             string    `json:"node,omitempty"`
	Waits            bool      `json:"waits"`                      // the scheduler has found no node for the pod
	Reason           string    `json:"reason"`                     // in a few words
	Fits             []string  `json:"fits,omitempty"`             // nodes with room for the pod's devices
	SchedulerMessage string    `json:"schedulerMessage,omitempty"` // the scheduler's message
	Warning          string    `json:"warning,omitempty"`          // the last Event about a pod that does not start
	Nodes            []Refusal `json:"nodes,omitempty"`            // nodes on which the pod cannot run
	Asked            []Request `json:"requests,omitempty"`         // one for each alternative of a request
	Nearest          *Nearest  `json:"nearest,omitempty"`          // the place with the fewest missing devices
	Fix              []string  `json:"fix,omitempty"`              // commands

	uncreatedClaim string // the pod's name for a claim that was not created from its template yet
}

// Refusal is the reason why a pod cannot run on nodes.
type Refusal struct {
	Why   string   `json:"reason"`
	Nodes []string `json:"nodes"`
}

// Request is a request of a claim, or of a container by its limits.
type Request struct {
	Claim    string         `json:"claim,omitempty"` // "" for limits
	Name     string         `json:"name"`            // of the request, "" for limits of a device plugin
	Resource string         `json:"resource,omitempty"`
	Class    string         `json:"class,omitempty"`
	Count    int64          `json:"count,omitempty"`
	All      bool           `json:"all,omitempty"`   // all devices, instead of a count
	Admin    bool           `json:"admin,omitempty"` // admin access
	Rules    []string       `json:"rules,omitempty"` // constraints on the set of devices
	Steps    []Step         `json:"steps,omitempty"`
	Left     int64          `json:"remaining"`
	But      string         `json:"insufficientBecause,omitempty"` // why the remaining devices are not enough
	Has      []fleet.Device `json:"available,omitempty"`
	Enough   bool           `json:"enough"`
}

// Step is the effect of one condition. The first step has the number of all devices, and each
// further step removes some.
type Step struct {
	Devices int64  `json:"devices"`
	What    string `json:"what"`
	Detail  string `json:"detail,omitempty"`
}

// Nearest is the place with the fewest missing devices.
type Nearest struct {
	Where   string `json:"where"`
	Has     int64  `json:"devicesFound"`
	Devices []Near `json:"devices,omitempty"`
}

// Near is a device of that place with the reason why it is unavailable.
type Near struct {
	fleet.Device
	Why string `json:"reason,omitempty"`
}

// explainer contains the input and the state of an explanation.
type explainer struct {
	ctx           context.Context
	fleet         *fleet.Fleet
	pod           *corev1.Pod
	library       *library
	claims        []*resourceapi.ResourceClaim // the pod's claims
	judgedByClass map[int]grouped              // devices by index of the request in the answer
	answer        *Answer

	resolver *extendedresourcecache.ExtendedResourceCache // for names in limits, made when needed
}

// ExplainPod returns why a pod waits, or which devices it has.
func ExplainPod(ctx context.Context, in fleet.Input, pod *corev1.Pod) (*Answer, error) {
	if len(in.Nodes) == 0 {
		in.Nodes = nodesOf(in.Slices)
	}
	a := &explainer{ctx: ctx, fleet: fleet.BuildFleet(in, ""), pod: pod, judgedByClass: make(map[int]grouped), answer: &Answer{
		Pod: pod.Namespace + "/" + pod.Name, Phase: string(pod.Status.Phase), Since: pod.CreationTimestamp.Time, Node: pod.Spec.NodeName,
	}}
	a.library = newLibrary(a.fleet)
	if pod.Spec.NodeName != "" {
		a.has()
		return a.answer, nil
	}
	a.answer.Waits = true
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
			a.answer.SchedulerMessage = condition.Message
		}
	}
	if missing := a.findClaims(); missing != "" {
		a.answer.Reason = missing
		return a.answer, nil
	}
	return a.answer, a.explainWait()
}

// nodesOf returns nodes with the names in slices, for users without permission to read nodes.
func nodesOf(all []resourceapi.ResourceSlice) (out []corev1.Node) {
	seen := make(map[string]bool)
	for i := range all {
		if name := ptr.Deref(all[i].Spec.NodeName, ""); name != "" && !seen[name] {
			seen[name] = true
			out = append(out, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}}})
		}
	}
	return out
}

// findClaims finds the claims of the pod. It treats a claim that will be created from a template as
// existing. It returns a text about missing objects, or "".
func (a *explainer) findClaims() (missing string) {
	if gates := a.pod.Spec.SchedulingGates; len(gates) > 0 {
		return fmt.Sprintf("its scheduling gate %s is not lifted", gates[0].Name)
	}
	for i := range a.pod.Spec.ResourceClaims {
		ref := &a.pod.Spec.ResourceClaims[i]
		name, _, err := resourceclaim.Name(a.pod, ref)
		switch {
		case err == nil && name == nil:
			continue // no claim is needed
		case err == nil:
			at := slices.IndexFunc(a.fleet.Claims, func(c resourceapi.ResourceClaim) bool { return c.Namespace == a.pod.Namespace && c.Name == *name })
			if at < 0 {
				a.repairName("resourceclaim", *name, names(a.fleet.Claims, a.pod.Namespace))
				return fmt.Sprintf("claim %s is not there", *name)
			}
			a.claims = append(a.claims, &a.fleet.Claims[at])
		case errors.Is(err, resourceclaim.ErrClaimNotFound) && ref.ResourceClaimTemplateName != nil:
			at := slices.IndexFunc(a.fleet.Templates, func(t resourceapi.ResourceClaimTemplate) bool {
				return t.Namespace == a.pod.Namespace && t.Name == *ref.ResourceClaimTemplateName
			})
			if at < 0 {
				a.repairName("resourceclaimtemplate", *ref.ResourceClaimTemplateName, names(a.fleet.Templates, a.pod.Namespace))
				return fmt.Sprintf("claim template %s is not there", *ref.ResourceClaimTemplateName)
			}
			claim := &resourceapi.ResourceClaim{Spec: a.fleet.Templates[at].Spec.Spec}
			claim.Namespace, claim.Name = a.pod.Namespace, a.pod.Name+"-"+ref.Name
			a.answer.uncreatedClaim = ref.Name
			a.claims = append(a.claims, claim)
		default:
			return err.Error()
		}
	}
	return ""
}

// explainWait explains why no node fits the pod.
func (a *explainer) explainWait() error {
	a.answer.Asked = append(a.claimRequests(), a.limitRequests()...)
	if len(a.answer.Asked) == 0 {
		a.answer.Reason = "it asks for no device"
		return nil
	}
	nodes := a.candidateNodes()
	var failed error
	for _, n := range nodes {
		if n.refusedReason != "" || n.missingReason != "" {
			continue
		}
		fits, err := a.library.fitsNode(a.ctx, n.Node, n.claims)
		if err != nil && failed == nil {
			failed = err
		}
		if fits {
			a.answer.Fits = append(a.answer.Fits, n.Name)
		}
	}
	if err := a.ctx.Err(); err != nil {
		return err
	}
	a.count(nodes)
	switch {
	case failed != nil:
		// The scheduler gives up for all nodes
		// (pkg/scheduler/framework/plugins/dynamicresources/dynamicresources.go of 1.37, Filter).
		a.answer.Fits = nil
		a.answer.Reason = failed.Error()
	case len(a.answer.Fits) > 0:
		a.answer.Reason = "its devices are to be had on " + someNames(a.answer.Fits, 3)
	default:
		a.answer.Reason = a.headlineText()
		a.findNearest(nodes)
	}
	return nil
}

// headlineText returns the first unsatisfied request as text.
func (a *explainer) headlineText() string {
	for _, r := range a.answer.Asked {
		if r.Enough {
			continue
		}
		if r.Claim == "" {
			return fmt.Sprintf("limits %s: %d", r.Resource, r.Count)
		}
		return fmt.Sprintf("claim %s cannot be allocated", r.Claim)
	}
	return "no node has all that it asks for together"
}

// someNames returns the first names and the number of the others.
func someNames(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// has adds the devices of a pod with a node.
func (a *explainer) has() {
	if a.pod.Status.StartTime != nil {
		a.answer.Since = a.pod.Status.StartTime.Time
	}
	a.answer.Reason = "with all that it asked for"
	at := make(map[string]int)
	mine := func(h fleet.Holder) bool { return h.Namespace == a.pod.Namespace && h.Pod == a.pod.Name }
	for i := range a.fleet.Devices {
		d := &a.fleet.Devices[i]
		for _, h := range d.Holders {
			if !mine(h) {
				continue
			}
			key := h.Claim + "\x00" + h.Request
			if _, found := at[key]; !found {
				at[key] = len(a.answer.Asked)
				a.answer.Asked = append(a.answer.Asked, a.allocatedRequest(h))
			}
			r := &a.answer.Asked[at[key]]
			r.Has = append(r.Has, *d)
		}
	}
	for i := range a.fleet.Resources {
		for _, h := range a.fleet.Resources[i].Holders {
			if mine(h) {
				a.answer.Asked = append(a.answer.Asked, Request{Resource: h.Resource, Count: h.Count, Left: h.Count, Enough: true})
			}
		}
	}
	slices.SortStableFunc(a.answer.Asked, func(x, y Request) int { return cmp.Compare(x.Claim, y.Claim) })
	if len(a.answer.Asked) == 0 {
		a.answer.Reason = "without a device"
		if phase := a.pod.Status.Phase; (phase == corev1.PodSucceeded || phase == corev1.PodFailed) && asksDevices(a.pod) {
			a.answer.Reason = "and has given its devices back"
		}
	}
}

// asksDevices reports whether a pod requests devices, by claims or by limits.
func asksDevices(pod *corev1.Pod) bool {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for name := range c.Resources.Limits {
			if strings.Contains(string(name), "/") {
				return true
			}
		}
	}
	return len(pod.Spec.ResourceClaims) > 0
}

// AddStartProblem adds the last warning about a pod on a node whose containers do not start, and
// commands for further investigation.
func (a *Answer) AddStartProblem(events []corev1.Event) {
	if a.Waits || a.Phase != string(corev1.PodPending) {
		return
	}
	var last *corev1.Event
	for i := range events {
		e := &events[i]
		if e.Type == corev1.EventTypeWarning && (last == nil || eventTime(e).After(eventTime(last))) {
			last = e
		}
	}
	if last == nil {
		return
	}
	a.Warning = last.Reason + ": " + last.Message
	a.Reason = "and its containers do not start"
	a.Fix = []string{
		"kubectl -n chandler get pods -o wide --field-selector spec.nodeName=" + a.Node,
		"kubectl -n chandler exec POD -- /chandler doctor   # with the agent's pod of that node",
	}
}

// AwaitsClaim reports whether a claim of the pod was not created from its template yet.
func (a *Answer) AwaitsClaim() bool { return a.Waits && a.uncreatedClaim != "" }

// claimNotMade is the reason of the Event about a claim that could not be created from its template
// (pkg/controller/resourceclaim/controller.go, syncPod, in 1.31 to 1.37).
const claimNotMade = "FailedResourceClaimCreation"

// AddTemplateProblem adds the reason why a claim could not be created from its template, for
// example a quota or a policy. Until the claim exists, the scheduler does not consider devices.
func (a *Answer) AddTemplateProblem(events []corev1.Event) {
	var last *corev1.Event
	for i := range events {
		if e := &events[i]; e.Reason == claimNotMade && (last == nil || eventTime(e).After(eventTime(last))) {
			last = e
		}
	}
	if last == nil || !a.AwaitsClaim() {
		return
	}
	a.Warning = last.Reason + ": " + last.Message
	a.Reason = fmt.Sprintf("its claim %s cannot be made", a.uncreatedClaim)
	a.Fix, a.Nearest = nil, nil
	namespace, _, _ := strings.Cut(a.Pod, "/")
	if strings.Contains(last.Message, "exceeded quota") {
		a.Fix = []string{"kubectl -n " + namespace + " describe resourcequota"}
	}
}

// eventTime returns the time of an Event's last occurrence.
func eventTime(e *corev1.Event) time.Time {
	at := e.LastTimestamp.Time
	if e.Series != nil && e.Series.LastObservedTime.After(at) {
		at = e.Series.LastObservedTime.Time
	}
	if at.IsZero() {
		at = e.EventTime.Time
	}
	return at
}

// allocatedRequest returns the request of an allocation.
func (a *explainer) allocatedRequest(h fleet.Holder) Request {
	r := Request{Claim: h.Claim, Name: h.Request, Resource: h.Resource, Admin: h.Admin, Enough: true}
	for i := range a.fleet.Claims {
		c := &a.fleet.Claims[i]
		if c.Namespace != h.Namespace || c.Name != h.Claim {
			continue
		}
		for _, asked := range alternativesOf(c) {
			if asked.request == h.Request {
				r.Class, r.Count, r.All, r.Rules = asked.exactly.DeviceClassName, asked.exactly.Count, asked.exactly.AllocationMode == resourceapi.DeviceAllocationModeAll, constraintTexts(c, asked)
				break
			}
		}
	}
	return r
}
