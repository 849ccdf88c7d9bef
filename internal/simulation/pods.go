package simulation

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/simulation/apiserver"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/kubelet"
	"chandler.dev/internal/simulation/machine"
)

// addAgentPod puts the agent's own pod on the node.
func (w *World) addAgentPod() {
	p := &pod{Pod: &kubelet.Pod{UID: "00000000-0000-4000-a000-000000000000", Namespace: "kube-system", Name: agentPod}, bound: true, inAPI: true}
	w.mu.Lock()
	w.pods[p.UID] = p
	w.mu.Unlock()
	w.putPod(p)
	w.kubelet.Add(p.Pod)
}

// strangerInfix separates the number of a share in the IDs of a vendor plugin.
const strangerInfix = "::"

// addStrangers adds, on some nodes, pods that got devices from another plugin before the first
// agent.
func (w *World) addStrangers() {
	if w.random.IntN(4) > 0 {
		return
	}
	devices := w.machine.Devices
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		d := devices[name]
		if d.Shareable || len(d.Offers) == 0 || len(d.Offers[0].IDs) > 1 || d.Offers[0].Members > 1 || d.PartOf != nil && d.Name != d.Silicon() || w.random.IntN(2) == 0 {
			continue
		}
		id := d.Offers[0].IDs[0]
		if d.Family == "nvidia" && w.random.IntN(3) == 0 {
			id += strangerInfix + "0"
		}
		p := w.newPod("old")
		p.bound, p.inAPI, p.Requests = true, true, map[string]int{d.Offers[0].Resource: 1}
		w.history.Log("pod %s has %s of another plugin's", p, id)
		w.mu.Lock()
		w.pods[p.UID] = p
		w.mu.Unlock()
		w.putPod(p)
		if err := w.kubelet.AddEarlierPod(p.Pod, map[string][]string{d.Offers[0].Resource: {id}}); err != nil {
			w.history.Fail("pod %s: %v", p, err)
		}
		w.history.CountFault("anotherPlugin")
	}
}

// podsOfNode returns the node's pods to the kubelet.
func (w *World) podsOfNode() ([]*kubelet.Pod, error) {
	if w.isDown() {
		return nil, apiserver.ErrDown
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []*kubelet.Pod
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		if p := w.pods[uid]; p.inAPI && p.bound && !p.ended {
			all = append(all, p.Pod)
		}
	}
	return all, nil
}

// podDone records that a pod has ended or was rejected. The kubelet calls podDone.
func (w *World) podDone(p *kubelet.Pod, why error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if one := w.pods[p.UID]; one != nil {
		one.ended = true
	}
}

// putPod writes a pod's present state to the API server.
func (w *World) putPod(p *pod) {
	spec := corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}}
	if p.bound {
		spec.NodeName = nodeName
	}
	for _, name := range p.Claims {
		spec.ResourceClaims = append(spec.ResourceClaims, corev1.PodResourceClaim{Name: name, ResourceClaimName: &name})
	}
	limits := corev1.ResourceList{}
	for resource, n := range p.Requests {
		limits[corev1.ResourceName(resource)] = machine.NewQuantity(int64(n))
	}
	spec.Containers[0].Resources.Limits = limits
	if p.Init {
		spec.Containers[0].Resources.Limits = nil
		spec.InitContainers = []corev1.Container{{Name: "init", Resources: corev1.ResourceRequirements{Limits: limits}}}
	}
	if p.Group != "" {
		spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &p.Group}
	}
	if p.Namespace == namespace {
		spec.TerminationGracePeriodSeconds = new(int64(p.Grace / time.Second))
	}
	object := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID}, Spec: spec}
	if !p.binding.IsZero() && !p.bound {
		object.Status.NominatedNodeName = nodeName
	}
	w.server.Put(object)
}

// newPod returns a pod without requests.
func (w *World) newPod(kind string) *pod {
	w.made++
	return &pod{own: true, Pod: &kubelet.Pod{
		UID: types.UID(fmt.Sprintf("%08x-0000-4000-b000-%012x", w.made, w.made)), Namespace: namespace, Name: fmt.Sprintf("%s-%d", kind, w.made),
		Grace: time.Duration(w.random.IntN(30)) * time.Second, Stubborn: w.random.IntN(2) == 0,
	}}
}

// makePod creates a pod with its own claims, with a claim that other pods may have too, or with
// extended resources.
func (w *World) makePod() {
	p := w.newPod("pod")
	if w.random.IntN(3) == 0 {
		p.Life = time.Duration(1+w.random.IntN(40)) * time.Second
		p.Restarts = w.random.IntN(3)
	}
	resources := slices.Sorted(maps.Keys(w.kubelet.AllocatableDevices()))
	switch {
	case len(resources) > 0 && w.random.IntN(2) == 0 || !w.offersDRA():
		if len(resources) == 0 {
			return
		}
		p.Requests = map[string]int{chance.PickOne(w.random, resources...): 1 + w.random.IntN(2)}
		p.Init = w.random.IntN(6) == 0
	case w.random.IntN(3) == 0:
		p.own = false
		p.Claims = []string{fmt.Sprintf("shared-%d", w.random.IntN(2))}
		if w.minor >= 37 && w.random.IntN(3) == 0 {
			p.Group = "group"
			p.Claims = []string{"of-the-group"}
		}
		if w.server.Claim(namespace, p.Claims[0]) == nil {
			w.makeClaim(p.Claims[0])
		}
	case w.random.IntN(10) == 0:
		w.makeMonitor(p)
	default:
		for i := range 1 + w.random.IntN(2) {
			name := fmt.Sprintf("%s-claim-%d", p.Name, i)
			if w.random.IntN(10) == 0 {
				name += "-" + strings.Repeat("long", 60) // fills the name's 253 bytes
				name = name[:253]
			}
			p.Claims = append(p.Claims, name)
			w.makeClaim(name)
		}
	}
	w.submitPod(p)
}

// submitPod adds a pod to the API server, and schedules the pod.
func (w *World) submitPod(p *pod) {
	w.history.Log("cluster: pod %s is made: claims %v, requests %v, init %v", p, short(p.Claims), p.Requests, p.Init)
	w.mu.Lock()
	p.inAPI = true
	w.pods[p.UID] = p
	w.mu.Unlock()
	w.putPod(p)
	w.bind(p)
}

func short(names []string) []string {
	var out []string
	for _, name := range names {
		out = append(out, name[:min(len(name), 24)])
	}
	return out
}

func (w *World) makeClaim(name string) {
	count := int64(1)
	if w.random.IntN(4) == 0 {
		count = 2
	}
	claim := newClaim(name, count)
	if shares := w.settings.Rules.Sharing; len(shares) > 0 && w.server.Features().Sharing && w.random.IntN(2) == 0 {
		capacity, amount := shares[0].Capacity, shares[0].Unit
		if shares[0].Replicas > 0 {
			capacity, amount = discovery.Shares, machine.NewQuantity(1)
		}
		amount.Mul(int64(1 + w.random.IntN(2)))
		claim.Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{capacity: amount}}
	}
	if w.machine.Joins && w.server.Features().Sharing && w.random.IntN(4) == 0 {
		requested := map[resourceapi.QualifiedName]resource.Quantity{discovery.Shares: machine.NewQuantity(int64(1 + w.random.IntN(2)))}
		claim.Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: requested}
	}
	w.specifyFunction(claim, nil)
	w.specifyDaemon(claim)
	w.server.Put(claim)
}

// makeMonitor turns a pod into a monitor, which observes all devices regardless of their consumers,
// by a claim with admin access.
func (w *World) makeMonitor(p *pod) {
	p.Claims = []string{p.Name + "-claim"}
	claim := newClaim(p.Claims[0], 0)
	request := claim.Spec.Devices.Requests[0].Exactly
	request.AllocationMode, request.AdminAccess = resourceapi.DeviceAllocationModeAll, new(true)
	w.server.Put(claim)
}

func newClaim(name string, count int64) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{{Name: "devices", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: className, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count,
		}}},
	}}}
}

// bind schedules a pod to the node if there is room. The scheduler may bind a pod long after it has
// allocated the pod's claims, while other plugins work. Since Kubernetes 1.35 it nominates the node for
// the pod before (bindingCycle in pkg/scheduler/schedule_one.go, 1.37).
func (w *World) bind(p *pod) {
	if p.bound || p.deleted || w.isDown() || time.Now().Before(p.binding) {
		return
	}
	for resource, n := range p.Requests {
		if w.kubelet.AllocatableDevices()[resource]-w.requestedTotal(resource) < n {
			return
		}
	}
	if !w.schedulePod(p) {
		return
	}
	if p.binding.IsZero() && len(p.Claims) > 0 && w.minor >= 35 && w.bindings.IntN(4) == 0 {
		p.binding = time.Now().Add(time.Duration(w.bindings.Int64N(int64(longestBinding))))
		w.putPod(p)
		w.history.Log("scheduler: pod %s is bound in %s", p, time.Until(p.binding))
		return
	}
	w.mu.Lock()
	p.bound = true
	w.mu.Unlock()
	w.putPod(p)
	w.history.Log("scheduler: pod %s is bound", p)
	w.kubelet.Add(p.Pod)
}

// longestBinding is the longest time of a binding cycle.
const longestBinding = 3 * time.Minute

// restartScheduler ends the binding cycles in progress. The next scheduler begins new cycles for the
// pods, with the claims that are allocated already.
func (w *World) restartScheduler() bool {
	found := false
	for _, p := range w.allPods() {
		if !p.bound && !p.binding.IsZero() {
			p.binding, found = time.Time{}, true
		}
	}
	if found {
		w.history.CountFault("schedulerRestarted")
	}
	return found
}

// requestedTotal returns the total of bound pods' requests for a resource.
func (w *World) requestedTotal(resource string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.pods {
		if p.bound && p.inAPI && !p.ended {
			n += p.Requests[resource]
		}
	}
	return n
}

// deletePod deletes a pod. With force, the pod is removed at once, regardless of its containers.
func (w *World) deletePod(p *pod, force bool) {
	w.mu.Lock()
	first := !p.deleted
	p.deleted = true
	gone := force || !p.bound
	if gone {
		p.inAPI = false
	}
	w.mu.Unlock()
	if first || force {
		w.history.Log("cluster: pod %s is deleted, force %v", p, force)
	}
	w.kubelet.Delete(p.UID, force)
	if gone {
		w.removePod(p)
	}
}

// removePod removes a pod from the API server.
func (w *World) removePod(p *pod) {
	w.server.Delete(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}})
	w.release(p)
	w.mu.Lock()
	defer w.mu.Unlock()
	p.inAPI = false
	delete(w.pods, p.UID)
}
