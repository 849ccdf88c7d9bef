package why

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/component-helpers/resource"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
	"k8s.io/klog/v2"

	"chandler.dev/internal/fleet"
)

// wantedResources returns the extended resources that a pod requests, with their amounts.
func wantedResources(pod *corev1.Pod) map[corev1.ResourceName]int64 {
	out := make(map[corev1.ResourceName]int64)
	for name, quantity := range resource.PodRequests(pod, resource.PodResourcesOptions{}) {
		implicit := strings.HasPrefix(string(name), resourceapi.ResourceDeviceClassPrefix)
		if (fleet.IsExtended(name) || implicit) && !quantity.IsZero() {
			out[name] = quantity.Value()
		}
	}
	return out
}

// classOf returns the class for a name in limits, by the rules of the scheduler.
func (a *explainer) classOf(name corev1.ResourceName) *resourceapi.DeviceClass {
	if a.resolver == nil {
		a.resolver = extendedresourcecache.NewExtendedResourceCache(klog.FromContext(a.ctx))
		for _, class := range a.library.classes {
			a.resolver.OnAdd(class, true)
		}
	}
	return a.resolver.GetDeviceClass(name)
}

// pluginResource returns the resource of a device plugin on a node, or nil.
func (a *explainer) pluginResource(node string, name corev1.ResourceName) *fleet.Resource {
	for i := range a.fleet.Resources {
		if r := &a.fleet.Resources[i]; r.Node == node && r.Name == string(name) {
			return r
		}
	}
	return nil
}

// limitNames returns all possible names in limits, of device plugins and of classes.
func (a *explainer) limitNames() (names []string) {
	for i := range a.fleet.Resources {
		names = append(names, a.fleet.Resources[i].Name)
	}
	for _, class := range a.library.classes {
		if name := class.Spec.ExtendedResourceName; name != nil {
			names = append(names, *name)
		}
	}
	return names
}

// byDRA reports whether the scheduler serves a name in limits by DRA on a node. It does if a class
// has the name and no device plugin on the node has a healthy device with the name.
func (a *explainer) byDRA(node string, name corev1.ResourceName) bool {
	r := a.pluginResource(node, name)
	return (r == nil || r.Allocatable == 0) && a.classOf(name) != nil
}

// short returns a device plugin resource with too little left on a node, or "".
func (a *explainer) short(node string) string {
	wants := wantedResources(a.pod)
	for _, name := range slices.Sorted(maps.Keys(wants)) {
		if a.byDRA(node, name) {
			continue
		}
		if r := a.pluginResource(node, name); r == nil || r.Free() < wants[name] {
			return string(name)
		}
	}
	return ""
}

// claimForLimits returns the claim that the scheduler would create for limits on a node. It returns
// nil if device plugins serve all limits
// (pkg/scheduler/framework/plugins/dynamicresources/extendeddynamicresources.go of 1.37,
// filterExtendedResources and createRequestsAndMappings).
func (a *explainer) claimForLimits(node *corev1.Node) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{}
	claim.Namespace, claim.Name = a.pod.Namespace, "<limits>"
	for _, name := range slices.Sorted(maps.Keys(wantedResources(a.pod))) {
		if a.byDRA(node.Name, name) {
			claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, requestsForLimits(a.pod, name, a.classOf(name).Name)...)
		}
	}
	if len(claim.Spec.Devices.Requests) == 0 {
		return nil
	}
	slices.SortFunc(claim.Spec.Devices.Requests, func(a, b resourceapi.DeviceRequest) int { return strings.Compare(a.Name, b.Name) })
	return claim
}

// requestsForLimits returns a request for each container that keeps running, and one for the init
// container with the highest demand beyond the containers after it.
func requestsForLimits(pod *corev1.Pod, name corev1.ResourceName, class string) (out []resourceapi.DeviceRequest) {
	containers := append(slices.Clone(pod.Spec.InitContainers), pod.Spec.Containers...)
	stay := make([]int64, len(containers))
	request := func(i int, count int64) resourceapi.DeviceRequest {
		return resourceapi.DeviceRequest{
			Name:    fmt.Sprintf("container-%d-%s", i, strings.Map(dashRune, string(name))),
			Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count},
		}
	}
	ends := func(i int) bool {
		policy := containers[i].RestartPolicy
		return i < len(pod.Spec.InitContainers) && (policy == nil || *policy != corev1.ContainerRestartPolicyAlways)
	}
	for i := range containers {
		if quantity := containers[i].Resources.Requests[name]; !ends(i) && quantity.Value() > 0 {
			stay[i] = quantity.Value()
			out = append(out, request(i, stay[i]))
		}
	}
	most, which := int64(0), 0
	for i := range containers {
		quantity := containers[i].Resources.Requests[name]
		more := quantity.Value()
		for _, later := range stay[i:] {
			more -= later
		}
		if ends(i) && more > most {
			most, which = more, i
		}
	}
	if most > 0 {
		out = append(out, request(which, most))
	}
	return out
}

func dashRune(r rune) rune {
	if r == '/' || r == '.' {
		return '-'
	}
	return r
}

// limitRequests returns the requests for the pod's limits: for device plugins if any node has the
// resource from a plugin, and for the class with the name.
func (a *explainer) limitRequests() (out []Request) {
	wants := wantedResources(a.pod)
	for _, name := range slices.Sorted(maps.Keys(wants)) {
		offered := slices.ContainsFunc(a.fleet.Resources, func(r fleet.Resource) bool { return r.Name == string(name) && r.Allocatable > 0 })
		class := a.classOf(name)
		if offered || class == nil {
			out = append(out, Request{Resource: string(name), Count: wants[name]})
		}
		if class != nil {
			out = append(out, Request{Resource: string(name), Class: class.Name, Count: wants[name], Name: "limits"})
		}
	}
	return out
}

// countPlugged counts the devices of device plugins for a resource.
func (a *explainer) countPlugged(r *Request, nodes []candidate) {
	var all, refused, out, held, best int64
	var at, no []string
	offers := 0
	for i := range nodes {
		n := &nodes[i]
		offer := a.pluginResource(n.Name, corev1.ResourceName(r.Resource))
		if offer == nil {
			continue
		}
		offers++
		total := offer.Free() + offer.Held + offer.Unavailable()
		all += total
		if n.refusedReason != "" {
			refused += total
			no = append(no, n.Name)
			continue
		}
		if n.missingReason == "" || n.missingReason == r.Resource {
			best = max(best, offer.Free())
		}
		if offer.Free() >= r.Count {
			r.Enough = true
		}
		out += offer.Unavailable()
		held += offer.Held
		r.Left += offer.Free()
		if offer.Unavailable() > 0 {
			at = append(at, n.Name)
		}
	}
	r.Steps = append(r.Steps, Step{all, "offered by device plugins under that name", onNodes(offers)})
	r.addStep(refused, "on nodes where the pod may not run", someNames(no, 2))
	r.addStep(out, "unhealthy or moving to the other API", someNames(at, 2))
	r.addStep(held, "allocated", a.holdersOf(r.Resource))
	switch {
	case all == 0 && a.classOf(corev1.ResourceName(r.Resource)) == nil:
		r.But = "and no DeviceClass has that name"
	case r.Enough:
	case r.Left < r.Count:
	default:
		r.But = fmt.Sprintf("and nowhere %d on one node", r.Count)
	}
}

func onNodes(n int) string {
	switch n {
	case 0:
		return ""
	case 1:
		return "on one node"
	}
	return fmt.Sprintf("on %d nodes", n)
}

// holdersOf returns the consumers of a device plugin resource.
func (a *explainer) holdersOf(name string) string {
	counts := make(map[string]int64)
	for i := range a.fleet.Resources {
		if a.fleet.Resources[i].Name != name {
			continue
		}
		for _, h := range a.fleet.Resources[i].Holders {
			counts[h.Name()] += h.Count
		}
	}
	return topConsumer(counts)
}

// addStep adds a step for a condition that removes devices.
func (r *Request) addStep(n int64, what, detail string) {
	if n > 0 {
		r.Steps = append(r.Steps, Step{-n, what, detail})
	}
}
