// Package fleet computes the allocations and free devices of a cluster from the objects in the API
// server: ResourceSlices, ResourceClaims, nodes and pods. It is pure and makes no calls. The
// devices of a pod by the device plugin API are known only on the pod's node.
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

// Input contains the objects of a cluster. A list that could not be read is empty.
type Input struct {
	Slices    []resourceapi.ResourceSlice
	Claims    []resourceapi.ResourceClaim
	Templates []resourceapi.ResourceClaimTemplate
	Classes   []resourceapi.DeviceClass
	Nodes     []corev1.Node
	Pods      []corev1.Pod
}

// ID identifies a device in the cluster.
type ID struct {
	Driver string `json:"driver"`
	Pool   string `json:"pool"`
	Device string `json:"device"`
}

// Fleet contains all devices of a cluster.
type Fleet struct {
	Input
	Devices   []Device   // by node, and in the order of their slices
	Resources []Resource // of the device plugin API, by node and name
	byID      map[ID]int
	consumed  map[ID]Amounts // of shared devices
}

// State is the availability of a device for the next pod.
type State string

// States. A device is in exactly one of them.
const (
	Free State = "free"        // available
	Held State = "allocated"   // allocated, or blocked by an allocation of its physical device
	Out  State = "unavailable" // not allocated and not available
	Open State = "shareable"   // unlimited sharing
)

// Device is a device of a slice, with its consumers.
type Device struct {
	ID
	Node    string            `json:"node,omitempty"`
	Label   string            `json:"label"` // short name on its node, such as gpu 1a:00.0
	Kind    string            `json:"kind"`
	Model   string            `json:"model,omitempty"`
	Memory  resource.Quantity `json:"memory,omitzero"`
	State   State             `json:"state"`
	Partly  bool              `json:"partly,omitempty"`  // partly allocated
	Taints  []Taint           `json:"taints,omitempty"`  // keys without the domain of Chandler
	Silicon string            `json:"silicon,omitempty"` // the physical device, if several devices share it
	Holders []Holder          `json:"consumers,omitempty"`

	// Shares is the capacity of a device that is shared by number, or the number of interchangeable
	// devices that are one device in the slice. AllocatedShares is the part that claims consume.
	Shares          int64 `json:"shares,omitempty"`
	AllocatedShares int64 `json:"allocatedShares,omitempty"`

	Spec resourceapi.Device `json:"-"` // as published
}

// A Taint is a problem of a device.
type Taint struct {
	Condition string                        `json:"condition"` // its key, without the domain of Chandler
	Effect    resourceapi.DeviceTaintEffect `json:"effect"`
	Since     time.Time                     `json:"since,omitzero"`
}

// Holder is an allocation of a device, or of a number of a resource's devices.
type Holder struct {
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod,omitempty"`      // "" for a claim that is reserved for no pod
	Claim     string    `json:"claim,omitempty"`    // "" for the device plugin API
	Request   string    `json:"request,omitempty"`  // of the claim
	Resource  string    `json:"resource,omitempty"` // in the limits of the pod
	Count     int64     `json:"count,omitempty"`    // for the device plugin API and of shares
	Admin     bool      `json:"admin,omitempty"`    // admin access, which does not block other claims
	Since     time.Time `json:"since,omitzero"`

	// Devices are the names of devices by the device plugin API, if they were read from the node's
	// agent.
	Devices []string `json:"devices,omitempty"`
}

// API returns the API of the allocation: DRA or plugin.
func (h *Holder) API() string {
	if h.Claim == "" {
		return "plugin"
	}
	return "DRA"
}

// ResourceOrClaim returns the resource in the pod's limits, or otherwise the claim.
func (h *Holder) ResourceOrClaim() string { return cmp.Or(h.Resource, h.Claim) }

// Name returns the pod, or otherwise the claim, with its namespace.
func (h *Holder) Name() string {
	if h.Pod == "" {
		return "claim " + h.Namespace + "/" + h.Claim
	}
	return h.Namespace + "/" + h.Pod
}

// BuildFleet returns the devices of the given driver, or of all drivers if it is "".
func BuildFleet(in Input, driver string) *Fleet {
	f := &Fleet{Input: in, byID: make(map[ID]int), consumed: make(map[ID]Amounts)}
	for _, slice := range current(in.Slices, driver) {
		for _, d := range slice.Spec.Devices {
			id := ID{slice.Spec.Driver, slice.Spec.Pool.Name, d.Name}
			f.byID[id] = len(f.Devices)
			f.Devices = append(f.Devices, describeDevice(id, cmp.Or(ptr.Deref(slice.Spec.NodeName, ""), ptr.Deref(d.NodeName, "")), d))
		}
	}
	f.setHolders()
	f.setStates()
	f.Resources = pluginResources(in.Nodes, in.Pods)
	return f
}

// current returns the slices of the newest generation of each pool of a driver. They are sorted by
// pool and by name, in the order of the scheduler (structured/internal/*/pools_*.go of
// k8s.io/dynamic-resource-allocation 0.37, sortSlicesByName).
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

// setHolders sets the consumers of each device.
func (f *Fleet) setHolders() {
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
			f.addConsumption(id, &result)
			request, _, _ := strings.Cut(result.Request, "/")
			holder := Holder{Namespace: claim.Namespace, Claim: claim.Name, Request: request, Admin: ptr.Deref(result.AdminAccess, false), Since: since}
			if shares, shared := result.ConsumedCapacity[discovery.Shares]; shared {
				holder.Count = shares.Value()
			}
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

// podsOf returns the pods in a claim's reservation.
func podsOf(claim *resourceapi.ResourceClaim) (pods []string) {
	for _, user := range claim.Status.ReservedFor {
		if user.Resource == "pods" && user.APIGroup == "" {
			pods = append(pods, user.Name)
		}
	}
	return pods
}

// resourceOf returns the name in a pod's limits for which the scheduler created a claim.
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

// setStates sets the state of each device.
func (f *Fleet) setStates() {
	left := f.countersLeft()
	for i := range f.Devices {
		d := &f.Devices[i]
		shares, allocated := d.Spec.Capacity[discovery.Shares].Value, f.consumed[d.ID][string(discovery.Shares)]
		d.Shares, d.AllocatedShares = shares.Value(), allocated.Value()
		d.State = d.stateBy(f.consumed[d.ID], left)
		if d.State == Free && len(d.BlockingHolders()) > 0 {
			d.Partly = true
		}
	}
}

// stateBy returns the state of a device, from its consumed capacity and the rest of all counters.
func (d *Device) stateBy(consumed Amounts, left map[ID]discovery.Budgets) State {
	shared := ptr.Deref(d.Spec.AllowMultipleAllocations, false)
	taken := len(d.BlockingHolders()) > 0
	switch {
	case taken && !shared:
		return Held
	case shared && !consumed.RoomFor(&d.Spec, nil):
		return Held
	case (!shared || !taken) && !sufficesFor(left[ID{Driver: d.Driver, Pool: d.Pool}], &d.Spec):
		return Held
	case d.IsBlocked():
		return Out
	case shared && IsOpen(&d.Spec):
		return Open
	}
	return Free
}

// CountAllocated returns how many devices are allocated and how many are not, free or unavailable:
// 0 or 1, or the shares of a device with shares.
func (d *Device) CountAllocated() (allocated, rest int64) {
	rest = 1
	if d.Shares > 0 {
		allocated, rest = d.AllocatedShares, max(0, d.Shares-d.AllocatedShares)
	}
	if d.State == Held {
		return allocated + rest, 0
	}
	return allocated, rest
}

// IsBlocked reports whether a taint keeps new pods from the device.
func (d *Device) IsBlocked() bool {
	return slices.ContainsFunc(d.Spec.Taints, func(t resourceapi.DeviceTaint) bool { return BlocksPods(t.Effect) })
}

// BlocksPods reports whether taints with the effect keep pods away. Other taints are only
// informative.
func BlocksPods(effect resourceapi.DeviceTaintEffect) bool {
	return effect == resourceapi.DeviceTaintEffectNoSchedule || effect == resourceapi.DeviceTaintEffectNoExecute
}

// BlockingHolders returns the consumers that block others.
func (d *Device) BlockingHolders() (out []Holder) {
	for _, h := range d.Holders {
		if !h.Admin {
			out = append(out, h)
		}
	}
	return out
}

// NodeNames returns the names of all nodes with devices or resources, sorted.
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

// taintsOf returns the taints of a device in short form.
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
