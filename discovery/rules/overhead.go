package rules

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// HostResources are the amounts of host CPU and memory that consumers of a device need, by the
// Node's resource names.
type HostResources map[corev1.ResourceName]resourceapi.NodeAllocatableOverhead

// Overhead is the host resources that consumers of the selected devices need.
type Overhead struct {
	Selector
	HostResources
}

// hostOverhead returns the host resources for a device from the first matching entry, nil if none
// matches. A share needs as much as a whole device, because each consumer has its own processes on
// the host.
func (r *Rules) hostOverhead(selects func(Selector) bool) HostResources {
	if i := slices.IndexFunc(r.Overhead, func(o Overhead) bool { return selects(o.Selector) }); i >= 0 {
		return r.Overhead[i].HostResources
	}
	return nil
}
