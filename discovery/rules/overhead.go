package rules

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// HostResources are what users of a device need of the host's own CPU and
// memory, by the names that the Node has for them.
type HostResources map[corev1.ResourceName]resourceapi.NodeAllocatableOverhead

// Overhead is what users of the selected devices need of the host.
type Overhead struct {
	Selector
	HostResources
}

// overhead returns what users of a device need by the first entry that selects
// it, nil if none does. The user of a share needs as much as the user of a whole
// device: each has its own processes on the host.
func (r *Rules) overhead(selects func(Selector) bool) HostResources {
	if i := slices.IndexFunc(r.Overhead, func(o Overhead) bool { return selects(o.Selector) }); i >= 0 {
		return r.Overhead[i].HostResources
	}
	return nil
}
