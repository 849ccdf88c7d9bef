package why

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"
)

// alternative is a request, or one of those of a request of which the first that is to be had
// is taken.
type alternative struct {
	claim   *resourceapi.ResourceClaim
	request string // its name
	sub     string // of an alternative, else ""
	exactly *resourceapi.ExactDeviceRequest
}

// name is by which the API names it.
func (a *alternative) name() string {
	if a.sub == "" {
		return a.request
	}
	return resourceclaim.CreateSubRequestRef(a.request, a.sub)
}

// alternatives returns all that a claim asks for.
func alternatives(claim *resourceapi.ResourceClaim) (out []alternative) {
	for i := range claim.Spec.Devices.Requests {
		r := &claim.Spec.Devices.Requests[i]
		if r.Exactly != nil {
			out = append(out, alternative{claim: claim, request: r.Name, exactly: r.Exactly})
		}
		for _, sub := range r.FirstAvailable {
			out = append(out, alternative{claim, r.Name, sub.Name, &resourceapi.ExactDeviceRequest{
				DeviceClassName: sub.DeviceClassName, Selectors: sub.Selectors, AllocationMode: sub.AllocationMode,
				Count: sub.Count, Tolerations: sub.Tolerations, Capacity: sub.Capacity, DerivedAttributes: sub.DerivedAttributes,
			}})
		}
	}
	return out
}

// alone returns a claim for this alternative and nothing else, with the constraints that
// some function keeps.
func (a *alternative) alone(keep func(*resourceapi.DeviceConstraint) bool) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: a.claim.ObjectMeta}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: a.request, Exactly: a.exactly}}
	for _, c := range a.claim.Spec.Devices.Constraints {
		if a.concerned(&c) && keep(&c) {
			c.Requests = nil
			claim.Spec.Devices.Constraints = append(claim.Spec.Devices.Constraints, c)
		}
	}
	return claim
}

// concerned reports whether a constraint is for the alternative, too.
func (a *alternative) concerned(c *resourceapi.DeviceConstraint) bool {
	return len(c.Requests) == 0 || slices.Contains(c.Requests, a.request) || slices.Contains(c.Requests, a.name())
}

// rules says in words what must hold for the devices of a request.
func rules(claim *resourceapi.ResourceClaim, a alternative) (out []string) {
	for _, c := range claim.Spec.Devices.Constraints {
		if a.concerned(&c) {
			out = append(out, constraintText(&c))
		}
	}
	return out
}

func constraintText(c *resourceapi.DeviceConstraint) string {
	if c.MatchAttribute != nil {
		return "on one " + string(*c.MatchAttribute)
	}
	return "each on another " + string(ptr.Deref(c.DistinctAttribute, ""))
}

// place is what people call devices that have an attribute in common.
func place(attribute resourceapi.FullyQualifiedName) string {
	switch string(attribute) {
	case deviceattribute.StandardDeviceAttributePrefix + "numaNode":
		return "NUMA node"
	case deviceattribute.StandardDeviceAttributePrefix + "pcieRoot":
		return "PCIe root"
	}
	_, name, _ := strings.Cut(string(attribute), "/")
	return name
}

// requests returns what the pod's claims ask for that are not allocated.
func (a *asker) requests() (out []Request) {
	for _, claim := range a.claims {
		if claim.Status.Allocation != nil {
			continue
		}
		for _, alt := range alternatives(claim) {
			out = append(out, a.asked(alt))
		}
	}
	return out
}

func (a *asker) asked(alt alternative) Request {
	return Request{
		Claim: alt.claim.Name, Name: alt.name(), Class: alt.exactly.DeviceClassName, Count: alt.exactly.Count,
		All:   alt.exactly.AllocationMode == resourceapi.DeviceAllocationModeAll,
		Admin: ptr.Deref(alt.exactly.AdminAccess, false), Rules: rules(alt.claim, alt),
	}
}

// total says how many devices are asked for.
func (r *Request) total() string {
	if r.All {
		return "all"
	}
	return fmt.Sprint(r.Count)
}
