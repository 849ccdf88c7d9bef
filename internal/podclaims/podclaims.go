// Package podclaims lists the ResourceClaims of a pod.
package podclaims

import corev1 "k8s.io/api/core/v1"

// ClaimsOf returns the names of the claims that a pod refers to.
func ClaimsOf(pod *corev1.Pod) []string {
	var names []string
	for _, claim := range pod.Spec.ResourceClaims {
		if claim.ResourceClaimName != nil {
			names = append(names, *claim.ResourceClaimName)
		}
	}
	for _, status := range pod.Status.ResourceClaimStatuses {
		if status.ResourceClaimName != nil {
			names = append(names, *status.ResourceClaimName)
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		names = append(names, extended.ResourceClaimName)
	}
	return names
}
