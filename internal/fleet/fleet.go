// Package fleet says of the devices of a cluster who has which and what is free, as far as
// the API server knows: by ResourceSlices, ResourceClaims, nodes and pods. It is pure and
// asks nobody. Which device a pod has by limits only the pod's node knows.
package fleet

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"chandler.dev/discovery"
)

// Input is what was read of a cluster. A list that could not be read is empty.
type Input struct {
	Slices    []resourceapi.ResourceSlice
	Claims    []resourceapi.ResourceClaim
	Templates []resourceapi.ResourceClaimTemplate
	Classes   []resourceapi.DeviceClass
	Nodes     []corev1.Node
	Pods      []corev1.Pod
}

// ID names a device in the cluster.
type ID struct {
	Driver string `json:"driver"`
	Pool   string `json:"pool"`
	Device string `json:"device"`
}

// Fleet is all devices of a cluster.
type Fleet struct {
	Input
	Devices   []Device   // by node, and in the order of their slices
	Resources []Resource // of the device-plugin API, by node and name
	byID      map[ID]int
	consumed  map[ID]Amounts // of devices that claims share
}

// State is what a device is to the next pod.
type State string

// States. A device is in exactly one of them.
const (
	Free State = "free" // a pod would get it
	Held State = "held" // somebody has it, or what it shares silicon with
	Out  State = "out"  // nobody has it, and nobody gets it
	Open State = "open" // any number of pods get it
)

// Device is a device of a slice, with its holders.
type Device struct {
	ID
	Node    string            `json:"node,omitempty"`
	Label   string            `json:"label"` // what people call it on its node: gpu 1a:00.0
	Kind    string            `json:"kind"`
	Model   string            `json:"model,omitempty"`
	Memory  resource.Quantity `json:"memory,omitzero"`
	State   State             `json:"state"`
	Partly  bool              `json:"partly,omitempty"`  // somebody has a part of it
	Taints  []Taint           `json:"taints,omitempty"`  // without those of other domains
	Silicon string            `json:"silicon,omitempty"` // of a device that others share silicon with
	Holders []Holder          `json:"holders,omitempty"`

	Spec resourceapi.Device `json:"-"` // as it is published
}

// A Taint says what is wrong with a device.
type Taint struct {
	Condition string                        `json:"condition"` // its key, without the domain of Chandler
	Effect    resourceapi.DeviceTaintEffect `json:"effect"`
	Since     time.Time                     `json:"since,omitzero"`
}

// Holder is who has a device, or a number of those of a resource.
type Holder struct {
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod,omitempty"`      // "" of a claim that is reserved for no pod
	Claim     string    `json:"claim,omitempty"`    // "" by the device-plugin API
	Request   string    `json:"request,omitempty"`  // of the claim
	Resource  string    `json:"resource,omitempty"` // by which the pod asked in its limits
	Count     int64     `json:"count,omitempty"`    // by the device-plugin API
	Admin     bool      `json:"admin,omitempty"`    // for administration: it keeps nobody out
	Since     time.Time `json:"since,omitzero"`

	// Devices are those of the device-plugin API, by name, if the node's agent was asked.
	Devices []string `json:"devices,omitempty"`
}

// API is the API by which somebody has something: DRA or plugin.
func (h *Holder) API() string {
	if h.Claim == "" {
		return "plugin"
	}
	return "DRA"
}

// By is by what somebody has it: the resource in limits, else the claim.
func (h *Holder) By() string { return cmp.Or(h.Resource, h.Claim) }

// Name is who that is: the pod, else the claim, with its namespace.
func (h *Holder) Name() string {
	if h.Pod == "" {
		return "claim " + h.Namespace + "/" + h.Claim
	}
	return h.Namespace + "/" + h.Pod
}

// Of returns the devices of the given driver, or of all drivers if it is "".
func Of(in Input, driver string) *Fleet {
	f := &Fleet{Input: in, byID: make(map[ID]int), consumed: make(map[ID]Amounts)}
	for _, slice := range current(in.Slices, driver) {
		for _, d := range slice.Spec.Devices {
			id := ID{slice.Spec.Driver, slice.Spec.Pool.Name, d.Name}
			f.byID[id] = len(f.Devices)
			f.Devices = append(f.Devices, describe(id, cmp.Or(ptr.Deref(slice.Spec.NodeName, ""), ptr.Deref(d.NodeName, "")), d))
		}
	}
	f.hold()
	f.judge()
	f.Resources = resources(in.Nodes, in.Pods)
	return f
}

// current returns the slices of a driver that count: of each pool those of the newest
// generation. They are by pool and by their own names, as the scheduler takes them
// (structured/internal/*/pools_*.go of k8s.io/dynamic-resource-allocation 0.37, sortSlicesByName).
func current(all []resourceapi.ResourceSlice, driver string) (out []*resourceapi.ResourceSlice) {
	newest := make(map[ID]int64)
	for i := range all {
		pool := poolOf(&all[i])
		newest[pool] = max(newest[pool], all[i].Spec.Pool.Generation)
	}
	for i := range all {
		pool := poolOf(&all[i])
		if (driver == "" || pool.Driver == driver) && all[i].Spec.Pool.Generation == newest[pool] {
			out = append(out, &all[i])
		}
	}
	slices.SortStableFunc(out, func(a, b *resourceapi.ResourceSlice) int {
		return cmp.Or(strings.Compare(a.Spec.Pool.Name, b.Spec.Pool.Name), strings.Compare(a.Spec.Driver, b.Spec.Driver), strings.Compare(a.Name, b.Name))
	})
	return out
}

func poolOf(slice *resourceapi.ResourceSlice) ID {
	return ID{Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name}
}

// hold says of each device who has it.
func (f *Fleet) hold() {
	byPod := make(map[types.NamespacedName]*corev1.Pod)
	for i := range f.Pods {
		byPod[types.NamespacedName{Namespace: f.Pods[i].Namespace, Name: f.Pods[i].Name}] = &f.Pods[i]
	}
	for i := range f.Claims {
		claim := &f.Claims[i]
		if claim.Status.Allocation == nil {
			continue
		}
		since := ptr.Deref(claim.Status.Allocation.AllocationTimestamp, claim.CreationTimestamp).Time
		for _, result := range claim.Status.Allocation.Devices.Results {
			id := ID{result.Driver, result.Pool, result.Device}
			at, found := f.byID[id]
			if !found {
				continue
			}
			f.consume(id, &result)
			request, _, _ := strings.Cut(result.Request, "/")
			holder := Holder{Namespace: claim.Namespace, Claim: claim.Name, Request: request, Admin: ptr.Deref(result.AdminAccess, false), Since: since}
			device := &f.Devices[at]
			pods := podsOf(claim)
			for _, pod := range pods {
				holder.Pod = pod
				holder.Resource = resourceOf(byPod[types.NamespacedName{Namespace: claim.Namespace, Name: pod}], claim.Name, request)
				device.Holders = append(device.Holders, holder)
			}
			if len(pods) == 0 {
				device.Holders = append(device.Holders, holder)
			}
		}
	}
}

// podsOf returns the pods that a claim is reserved for.
func podsOf(claim *resourceapi.ResourceClaim) (pods []string) {
	for _, user := range claim.Status.ReservedFor {
		if user.Resource == "pods" && user.APIGroup == "" {
			pods = append(pods, user.Name)
		}
	}
	return pods
}

// resourceOf returns the name in a pod's limits for which the scheduler made a claim.
func resourceOf(pod *corev1.Pod, claim, request string) string {
	if pod == nil || pod.Status.ExtendedResourceClaimStatus == nil || pod.Status.ExtendedResourceClaimStatus.ResourceClaimName != claim {
		return ""
	}
	for _, mapping := range pod.Status.ExtendedResourceClaimStatus.RequestMappings {
		if mapping.RequestName == request {
			return mapping.ResourceName
		}
	}
	return ""
}

// judge says of each device what it is to the next pod.
func (f *Fleet) judge() {
	left := f.countersLeft()
	for i := range f.Devices {
		d := &f.Devices[i]
		d.State = d.stateBy(f.consumed[d.ID], left)
		if d.State == Free && len(d.Keepers()) > 0 {
			d.Partly = true
		}
	}
}

// stateBy returns the state of a device of which so much is consumed, while so much is
// left of counters.
func (d *Device) stateBy(consumed Amounts, left map[ID]map[string]Amounts) State {
	shared := ptr.Deref(d.Spec.AllowMultipleAllocations, false)
	taken := len(d.Keepers()) > 0
	switch {
	case taken && !shared:
		return Held
	case shared && !consumed.RoomFor(&d.Spec, nil):
		return Held
	case (!shared || !taken) && !Suffices(left[ID{Driver: d.Driver, Pool: d.Pool}], &d.Spec):
		return Held
	case d.Barred():
		return Out
	case shared && IsOpen(&d.Spec):
		return Open
	}
	return Free
}

// Barred reports whether a taint keeps new pods from the device.
func (d *Device) Barred() bool {
	return slices.ContainsFunc(d.Spec.Taints, func(t resourceapi.DeviceTaint) bool { return Bars(t.Effect) })
}

// Bars reports whether a taint of that effect keeps pods away. Others only tell.
func Bars(effect resourceapi.DeviceTaintEffect) bool {
	return effect == resourceapi.DeviceTaintEffectNoSchedule || effect == resourceapi.DeviceTaintEffectNoExecute
}

// Keepers are those holders that keep others out.
func (d *Device) Keepers() (out []Holder) {
	for _, h := range d.Holders {
		if !h.Admin {
			out = append(out, h)
		}
	}
	return out
}

// NodeNames returns the names of all nodes that have devices or resources, sorted.
func (f *Fleet) NodeNames() []string {
	names := make(map[string]bool)
	for i := range f.Devices {
		names[f.Devices[i].Node] = true
	}
	for i := range f.Resources {
		names[f.Resources[i].Node] = true
	}
	delete(names, "")
	return slices.Sorted(maps.Keys(names))
}

// taintsOf returns what is wrong with a device, shortly.
func taintsOf(d *resourceapi.Device) (out []Taint) {
	for _, t := range d.Taints {
		taint := Taint{Condition: strings.TrimPrefix(t.Key, discovery.Domain+"/"), Effect: t.Effect}
		if t.TimeAdded != nil {
			taint.Since = t.TimeAdded.Time
		}
		out = append(out, taint)
	}
	return out
}
