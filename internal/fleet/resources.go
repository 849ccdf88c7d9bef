package fleet

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"

	"chandler.dev/discovery"
)

// Resource is a resource of a device plugin on a node. The API server does not show which plugin
// offers the resource.
type Resource struct {
	Node        string   `json:"node"`
	Name        string   `json:"name"`
	Capacity    int64    `json:"capacity"`    // all IDs in the plugin's list
	Allocatable int64    `json:"allocatable"` // healthy IDs
	Held        int64    `json:"allocated"`   // requested by pods on the node
	Holders     []Holder `json:"consumers,omitempty"`
}

// Free returns the number that is available now.
func (r *Resource) Free() int64 { return max(0, r.Allocatable-r.Held) }

// Unavailable returns the number that is neither allocated nor available.
func (r *Resource) Unavailable() int64 { return max(0, r.Capacity-r.Free()-r.Held) }

// Is reports whether a word identifies the resource: its name with or without the domain.
func (r *Resource) Is(word string) bool {
	_, short, _ := strings.Cut(r.Name, "/")
	return strings.EqualFold(r.Name, word) || short != "" && strings.EqualFold(short, word)
}

// Open reports whether the resource is a single device with unlimited sharing, rather than as many
// devices as IDs.
func (r *Resource) Open() bool { return r.Capacity == discovery.AnyNumber }

// IsExtended reports whether a name in limits is an extended resource (pkg/apis/core/v1/helper of
// Kubernetes 1.31 to 1.37, IsExtendedResourceName).
func IsExtended(name corev1.ResourceName) bool {
	return strings.Contains(string(name), "/") && !strings.Contains(string(name), corev1.ResourceDefaultNamespacePrefix)
}

// pluginResources returns the resources of device plugins on the nodes, with their consumers.
func pluginResources(nodes []corev1.Node, pods []corev1.Pod) (out []Resource) {
	at := make(map[[2]string]int)
	for i := range nodes {
		for name, capacity := range nodes[i].Status.Capacity {
			if IsExtended(name) {
				allocatable := nodes[i].Status.Allocatable[name]
				out = append(out, Resource{Node: nodes[i].Name, Name: string(name), Capacity: capacity.Value(), Allocatable: allocatable.Value()})
			}
		}
	}
	slices.SortFunc(out, func(a, b Resource) int {
		return cmp.Or(strings.Compare(a.Node, b.Node), strings.Compare(a.Name, b.Name))
	})
	for i := range out {
		at[[2]string{out[i].Node, out[i].Name}] = i
	}
	for i := range pods {
		pod := &pods[i]
		if HasEnded(pod) || pod.Spec.NodeName == "" {
			continue
		}
		for name, quantity := range resource.PodRequests(pod, resource.PodResourcesOptions{}) {
			index, offered := at[[2]string{pod.Spec.NodeName, string(name)}]
			if !offered || quantity.IsZero() || byClaim(pod, string(name)) {
				continue
			}
			holder := Holder{Namespace: pod.Namespace, Pod: pod.Name, Resource: string(name), Count: quantity.Value(), Since: pod.CreationTimestamp.Time}
			if pod.Status.StartTime != nil {
				holder.Since = pod.Status.StartTime.Time
			}
			out[index].Held += holder.Count
			out[index].Holders = append(out[index].Holders, holder)
		}
	}
	// The kubelet keeps the resource of a removed plugin with a capacity of 0.
	return slices.DeleteFunc(out, func(r Resource) bool { return r.Capacity == 0 && r.Held == 0 })
}

// HasEnded reports whether a pod has ended and has no allocations anymore.
func HasEnded(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// byClaim reports whether the scheduler created a claim for a name in the limits of a pod.
func byClaim(pod *corev1.Pod, name string) bool {
	status := pod.Status.ExtendedResourceClaimStatus
	return status != nil && slices.ContainsFunc(status.RequestMappings, func(m corev1.ContainerExtendedResourceRequest) bool { return m.ResourceName == name })
}
