// Package cluster models the parts of a cluster that concern the pods of one node: the scheduler, with
// its cache of slices and its binding cycles, the claim controller, and the pods with their state in the
// API server. It creates pods and claims only as the caller wants them.
package cluster

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/simulation/apiserver"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/history"
	"chandler.dev/internal/simulation/kubelet"
	"chandler.dev/internal/simulation/machine"
)

const (
	// Namespace is the namespace of all pods except that of the agent.
	Namespace = "default"
	// className is the name of the only DeviceClass.
	className = "any"
)

// Config holds what a cluster needs.
type Config struct {
	Node     string
	Minor    int // minor version of Kubernetes
	Server   *apiserver.Server
	History  *history.History
	Random   *rand.Rand  // for the properties of pods
	Bindings *rand.Rand  // for binding cycles
	Down     func() bool // reports whether the API server is down

	// Allocated is called when the scheduler allocates devices to a claim, with the slices that it
	// has used.
	Allocated func(claim types.UID, results []resourceapi.DeviceRequestAllocationResult, of []*resourceapi.ResourceSlice)
}

// Cluster is a cluster with one node.
type Cluster struct {
	Config
	Kubelet *kubelet.Kubelet
	Lag     int64 // the lag of the scheduler's cache of slices, in changes

	mu   sync.Mutex
	pods map[types.UID]*Pod // all created pods that have not ended
	made int
}

// New returns a cluster without pods.
func New(config Config) *Cluster {
	return &Cluster{Config: config, pods: make(map[types.UID]*Pod)}
}

// Pod is a pod with its state in the cluster.
type Pod struct {
	*kubelet.Pod
	Own     bool // its claims were created for this pod
	Bound   bool
	Binding time.Time // when the scheduler binds the pod, whose claims are allocated; zero before
	tried   int64     // the version of the API server at the last failed attempt to schedule the pod
	inAPI   bool
	started bool // a container has started
	running bool // the API server has the phase Running
	ended   bool // its containers have ended
	Deleted bool

	Lingers time.Duration // how long its process outlives its container; by chance if 0
}

// AddAgentPod puts the agent's own pod on the node.
func (c *Cluster) AddAgentPod(name string) {
	p := &Pod{Pod: &kubelet.Pod{UID: "00000000-0000-4000-a000-000000000000", Namespace: "kube-system", Name: name}}
	c.AddBoundPod(p)
	c.Kubelet.Add(p.Pod)
}

// AddBoundPod adds a pod that was bound to the node before.
func (c *Cluster) AddBoundPod(p *Pod) {
	p.Bound, p.inAPI = true, true
	c.mu.Lock()
	c.pods[p.UID] = p
	c.mu.Unlock()
	c.putPod(p)
}

// TendPods schedules waiting pods, and removes pods that have ended.
func (c *Cluster) TendPods() {
	c.ForgetEnded()
	for _, p := range c.AllPods() {
		c.mu.Lock()
		bound, deleted, runs := p.Bound, p.Deleted, p.started && !p.running && p.inAPI
		c.mu.Unlock()
		if runs {
			p.running = true
			c.putPod(p)
		}
		if deleted {
			c.Kubelet.Delete(p.UID, false) // the kubelet may have been down
		}
		if !bound && p.Namespace == Namespace {
			c.bind(p)
		}
	}
}

// BoundPods returns the node's pods to the kubelet.
func (c *Cluster) BoundPods() ([]*kubelet.Pod, error) {
	if c.Down() {
		return nil, apiserver.ErrDown
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []*kubelet.Pod
	for _, uid := range slices.Sorted(maps.Keys(c.pods)) {
		if p := c.pods[uid]; p.inAPI && p.Bound && !p.ended {
			all = append(all, p.Pod)
		}
	}
	return all, nil
}

// PodStarted records that a container of a pod has started.
func (c *Cluster) PodStarted(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.pods[uid]; p != nil {
		p.started = true
	}
}

// PodDone records that a pod has ended or was rejected. The kubelet calls PodDone.
func (c *Cluster) PodDone(p *kubelet.Pod, why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if one := c.pods[p.UID]; one != nil {
		one.ended = true
	}
}

// putPod writes a pod's present state to the API server.
func (c *Cluster) putPod(p *Pod) {
	spec := corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}}
	if p.Bound {
		spec.NodeName = c.Node
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
	if p.Namespace == Namespace {
		spec.TerminationGracePeriodSeconds = new(int64(p.Grace / time.Second))
	}
	object := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID}, Spec: spec}
	if !p.Binding.IsZero() && !p.Bound {
		object.Status.NominatedNodeName = c.Node
	}
	if p.running {
		object.Status.Phase = corev1.PodRunning
	}
	c.Server.Put(object)
}

// NewPod returns a pod without requests.
func (c *Cluster) NewPod(kind string) *Pod {
	c.made++
	return &Pod{Own: true, Pod: &kubelet.Pod{
		UID: types.UID(fmt.Sprintf("%08x-0000-4000-b000-%012x", c.made, c.made)), Namespace: Namespace, Name: fmt.Sprintf("%s-%d", kind, c.made),
		Grace: time.Duration(c.Random.IntN(30)) * time.Second, Stubborn: c.Random.IntN(2) == 0,
	}}
}

// SubmitPod adds a pod to the API server, and schedules the pod.
func (c *Cluster) SubmitPod(p *Pod) {
	c.History.Log("cluster: pod %s is made: claims %v, requests %v, init %v", p, short(p.Claims), p.Requests, p.Init)
	c.mu.Lock()
	p.inAPI = true
	c.pods[p.UID] = p
	c.mu.Unlock()
	c.putPod(p)
	c.bind(p)
}

func short(names []string) []string {
	var out []string
	for _, name := range names {
		out = append(out, name[:min(len(name), 24)])
	}
	return out
}

// NewClaim returns a claim for a number of devices.
func NewClaim(name string, count int64) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: name}, Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{{Name: "devices", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: className, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count,
		}}},
	}}}
}

// bind schedules a pod to the node if there is room. The scheduler may bind a pod long after it has
// allocated the pod's claims, while other plugins work. Since Kubernetes 1.35 it nominates the node for
// the pod before (bindingCycle in pkg/scheduler/schedule_one.go, 1.37).
func (c *Cluster) bind(p *Pod) {
	if p.Bound || p.Deleted || c.Down() || time.Now().Before(p.Binding) {
		return
	}
	for resource, n := range p.Requests {
		if c.Kubelet.AllocatableDevices()[resource]-c.requestedTotal(resource) < n {
			return
		}
	}
	if !c.SchedulePod(p) {
		return
	}
	if p.Binding.IsZero() && len(p.Claims) > 0 && c.Minor >= 35 && c.Bindings.IntN(4) == 0 {
		p.Binding = time.Now().Add(time.Duration(c.Bindings.Int64N(int64(LongestBinding))))
		c.putPod(p)
		c.History.Log("scheduler: pod %s is bound in %s", p, time.Until(p.Binding))
		return
	}
	c.mu.Lock()
	p.Bound = true
	c.mu.Unlock()
	c.putPod(p)
	c.History.Log("scheduler: pod %s is bound", p)
	c.Kubelet.Add(p.Pod)
}

// LongestBinding is the longest time of a binding cycle.
const LongestBinding = 3 * time.Minute

// RestartScheduler ends the binding cycles in progress, and reports whether there were any. The next
// scheduler begins new cycles for the pods, with the claims that are allocated already.
func (c *Cluster) RestartScheduler() bool {
	found := false
	for _, p := range c.AllPods() {
		if !p.Bound && !p.Binding.IsZero() {
			p.Binding, found = time.Time{}, true
		}
	}
	return found
}

// requestedTotal returns the total of bound pods' requests for a resource.
func (c *Cluster) requestedTotal(resource string) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pods {
		if p.Bound && p.inAPI && !p.ended {
			n += p.Requests[resource]
		}
	}
	return n
}

// DeletePod deletes a pod. With force, the pod is removed at once, regardless of its containers.
func (c *Cluster) DeletePod(p *Pod, force bool) {
	c.mu.Lock()
	first := !p.Deleted
	p.Deleted = true
	gone := force || !p.Bound
	if gone {
		p.inAPI = false
	}
	c.mu.Unlock()
	if first || force {
		c.History.Log("cluster: pod %s is deleted, force %v", p, force)
	}
	c.Kubelet.Delete(p.UID, force)
	if gone {
		c.removePod(p)
	}
}

// removePod removes a pod from the API server.
func (c *Cluster) removePod(p *Pod) {
	c.Server.Delete(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}})
	c.release(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	p.inAPI = false
	delete(c.pods, p.UID)
}

// ForgetEnded removes pods that have ended.
func (c *Cluster) ForgetEnded() {
	for _, p := range c.AllPods() {
		c.mu.Lock()
		ended := p.ended
		c.mu.Unlock()
		if ended && p.Namespace == Namespace && !c.Down() {
			c.removePod(p)
		}
	}
}

// AllPods returns all pods, sorted by UID.
func (c *Cluster) AllPods() (all []*Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(c.pods)) {
		all = append(all, c.pods[uid])
	}
	return all
}

// PickPod returns one of the matching pods, nil if there are none.
func (c *Cluster) PickPod(match func(*Pod) bool) *Pod {
	all := slices.DeleteFunc(c.AllPods(), func(p *Pod) bool { return p.Namespace != Namespace || !match(p) })
	if len(all) == 0 {
		return nil
	}
	return chance.PickOne(c.Random, all...)
}

// PodOf returns a pod by its UID, nil if it has ended.
func (c *Cluster) PodOf(uid types.UID) *Pod {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pods[uid]
}

// PodCount returns the number of pods so far, without the agent's own.
func (c *Cluster) PodCount() int { return c.made }
