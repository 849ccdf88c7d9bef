package driver

import (
	resourceapi "k8s.io/api/resource/v1"
)

// extendedResourcePod returns the pod for whose extended resources the scheduler made a claim, and
// "" for other claims. The pod is the controller of such a claim
// (pkg/scheduler/framework/plugins/dynamicresources/extendeddynamicresources.go, in 1.34 to 1.37).
func extendedResourcePod(claim *resourceapi.ResourceClaim) string {
	if claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] != "true" {
		return ""
	}
	for _, owner := range claim.OwnerReferences {
		if owner.Kind == "Pod" && owner.Controller != nil && *owner.Controller {
			return owner.Name
		}
	}
	return ""
}

// classOf returns the DeviceClass of a request. Each request of a claim for extended resources
// names one.
func classOf(claim *resourceapi.ResourceClaim, request string) string {
	for i := range claim.Spec.Devices.Requests {
		if r := &claim.Spec.Devices.Requests[i]; r.Name == request && r.Exactly != nil {
			return r.Exactly.DeviceClassName
		}
	}
	return ""
}
