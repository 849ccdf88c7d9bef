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

// alternative is a request, or one of the alternatives of a prioritized list.
type alternative struct {
	claim   *resourceapi.ResourceClaim
	request string // name of the request
	sub     string // name of the alternative, or ""
	exactly *resourceapi.ExactDeviceRequest
}

// name returns the full name in the API.
func (a *alternative) name() string {
	if a.sub == "" {
		return a.request
	}
	return resourceclaim.CreateSubRequestRef(a.request, a.sub)
}

// alternativesOf returns all alternatives of a claim.
func alternativesOf(claim *resourceapi.ResourceClaim) (out []alternative) {
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

// claimAlone returns a claim for only this alternative, with the constraints selected by keep.
func (a *alternative) claimAlone(keep func(*resourceapi.DeviceConstraint) bool) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: a.claim.ObjectMeta}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: a.request, Exactly: a.exactly}}
	for _, c := range a.claim.Spec.Devices.Constraints {
		if a.isConcerned(&c) && keep(&c) {
			c.Requests = nil
			claim.Spec.Devices.Constraints = append(claim.Spec.Devices.Constraints, c)
		}
	}
	return claim
}

// isConcerned reports whether a constraint applies to the alternative.
func (a *alternative) isConcerned(c *resourceapi.DeviceConstraint) bool {
	return len(c.Requests) == 0 || slices.Contains(c.Requests, a.request) || slices.Contains(c.Requests, a.name())
}

// constraintTexts returns the constraints on the devices of a request in words.
func constraintTexts(claim *resourceapi.ResourceClaim, a alternative) (out []string) {
	for _, c := range claim.Spec.Devices.Constraints {
		if a.isConcerned(&c) {
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

// placeName returns the usual name for the value of a common attribute.
func placeName(attribute resourceapi.FullyQualifiedName) string {
	switch string(attribute) {
	case deviceattribute.StandardDeviceAttributePrefix + "numaNode":
		return "NUMA node"
	case deviceattribute.StandardDeviceAttributePrefix + "pcieRoot":
		return "PCIe root"
	}
	_, name, _ := strings.Cut(string(attribute), "/")
	return name
}

// claimRequests returns the requests of the pod's unallocated claims.
func (a *explainer) claimRequests() (out []Request) {
	for _, claim := range a.claims {
		if claim.Status.Allocation != nil {
			continue
		}
		for _, alt := range alternativesOf(claim) {
			out = append(out, a.newRequest(alt))
		}
	}
	return out
}

func (a *explainer) newRequest(alt alternative) Request {
	return Request{
		Claim: alt.claim.Name, Name: alt.name(), Class: alt.exactly.DeviceClassName, Count: alt.exactly.Count,
		All:   alt.exactly.AllocationMode == resourceapi.DeviceAllocationModeAll,
		Admin: ptr.Deref(alt.exactly.AdminAccess, false), Rules: constraintTexts(alt.claim, alt),
	}
}

// totalText returns the number of requested devices as text.
func (r *Request) totalText() string {
	if r.All {
		return "all"
	}
	return fmt.Sprint(r.Count)
}
