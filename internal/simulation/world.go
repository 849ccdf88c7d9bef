// Package simulation runs whole agents of a node against models of a kubelet, an
// API server, a kernel and a disk, with faults of each. A seed fixes the
// configuration, the pods, the faults and when they come; which goroutine goes
// first is not fixed. It is no part of the product.
package simulation

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/internal/simulation/apiserver"
	"chandler.dev/internal/simulation/disk"
	"chandler.dev/internal/simulation/kernel"
	"chandler.dev/internal/simulation/kubelet"
)

const (
	nodeName  = "node"
	className = "any"
	agentPod  = "chandler"
	namespace = "default"
)

// World is a node in a cluster, and all that happens to it.
type World struct {
	seed   uint64
	random *rand.Rand // of the root goroutine
	start  time.Time

	machine  *machine
	cards    []card // of the machine, with the nodes that they have now
	forms    []form // as the administrator wants devices, the last at present
	settings agent.Settings
	mode     discovery.Mode
	minor    int // of Kubernetes
	metadata bool
	surges   bool // an upgrade has both agents run for a while
	rescan   time.Duration
	lag      int64 // how many changes the scheduler's cache of slices is behind
	boot     string
	boots    int
	keeps    apiserver.Features // what the API server kept when the last agent started

	server  *apiserver.Server
	kubelet *kubelet.Kubelet
	host    *kernel.Host
	disk    *disk.Disk
	lock    lock

	agents int
	living []*incarnation // those that were not killed or ended by us
	all    []*incarnation

	mu       sync.Mutex
	history  []string
	seen     map[string]int // faults that happened
	faults   *rand.Rand     // of all goroutines
	failures []string
	wiped    bool            // somebody removed or damaged what the agent wrote down
	forgot   bool            // the kubelet forgot claims
	swapped  bool            // a card was replaced by another
	parted   map[string]bool // silicon of several functions of which one was gone
	lost     bool            // there may be specs missing that nobody knows of any more
	hurt     bool            // an agent died before it could write what was missing
	healed   time.Time
	portions map[portion]part

	pods    map[types.UID]*pod // all that were made and have not ended
	made    int
	events  int
	struck  int // faults
	ongoing map[string]*ongoing
}

// pod is a pod with what the cluster knows of it.
type pod struct {
	*kubelet.Pod
	own     bool // its claims were made for it
	bound   bool
	tried   int64 // of which version the API server was when there was no place for it
	inAPI   bool
	ended   bool // its containers have
	deleted bool
}

// ongoing is a fault that ends by itself.
type ongoing struct {
	until time.Time
	end   func()
}

// NewWorld returns the world of a seed. It is for one bubble.
func NewWorld(seed uint64) *World {
	w := &World{
		seed: seed, random: rand.New(rand.NewPCG(seed, 1)), faults: rand.New(rand.NewPCG(seed, 2)), start: time.Now(),
		seen: make(map[string]int), portions: make(map[portion]part), pods: make(map[types.UID]*pod), parted: make(map[string]bool), ongoing: make(map[string]*ongoing),
		server: apiserver.New(), lock: lock{waiting: make(map[*incarnation]bool)},
	}
	w.configure()
	w.host = kernel.New(w.machine.text)
	w.disk = disk.New(func(line string) { w.log("disk: %s", line) }, kubeletRoot+"/plugins", kubeletRoot+"/plugins_registry", "/var/run")
	w.kubelet = kubelet.New(kubelet.Config{
		Minor: w.minor, Node: nodeName, Driver: discovery.Domain, Client: w.server.Client(nil),
		Pods: w.podsOfNode, Start: w.startContainer, Done: w.podDone, Log: w.log,
		Ended: func(c *kubelet.Container) { w.log("runtime: container of pod %s has ended", c.Pod) },
		Lacks: func(p *kubelet.Pod, resource, id string) {
			if w.seen["stateWiped"] == 0 {
				w.fail("resource %s is listed without %s, which pod %s has", resource, id, p)
			}
		},
		Wipe:   func() { w.server.DeleteSlices(nodeName) },
		Random: rand.New(rand.NewPCG(seed, 3)),
	})
	w.server.Put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}})
	w.newBoot()
	return w
}

func (w *World) newBoot() {
	w.boots++
	// Boot IDs are of one length.
	w.boot = fmt.Sprintf("boot-%02d", w.boots)
}

// configure chooses what the node and the cluster are.
func (w *World) configure() {
	w.minor = pick(w.random, 31, 34, 36, 37, 37)
	w.server.Serve(w.minor >= 34)
	all, _ := machines()
	w.machine = pick(w.random, all...)
	w.cards = slices.Clone(w.machine.cards)
	w.metadata = w.random.IntN(3) > 0
	w.surges = w.random.IntN(2) == 0
	w.rescan = time.Duration(20+w.random.IntN(40)) * time.Second
	w.server.SetFeatures(featuresOf(w.minor))
	w.log("seed %d: Kubernetes 1.%d, host %s, metadata %v, surges %v", w.seed, w.minor, w.machine.name, w.metadata, w.surges)
	w.want()
}

// featuresOf returns what an API server of a version keeps by default.
func featuresOf(minor int) apiserver.Features {
	f := apiserver.AllFeatures
	if minor <= 36 {
		f.Overhead, f.Groups, f.Types, f.Lists = false, false, false, false
	}
	if minor <= 35 {
		f.Bindings, f.Sharing = false, false
	}
	if minor <= 34 {
		f.Taints, f.NoneEffect, f.Counters, f.Separate = false, false, false, false
	}
	return f
}

func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// log adds a line to the history.
func (w *World) log(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.history = append(w.history, fmt.Sprintf("%10.3f %s", time.Since(w.start).Seconds(), line))
}

// fail notes that an invariant does not hold.
func (w *World) fail(format string, args ...any) {
	w.log("FAILURE: "+format, args...)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures = append(w.failures, fmt.Sprintf(format, args...))
}

// saw counts a fault that happened.
func (w *World) saw(fault string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen[fault]++
}

// chance draws for any goroutine.
func (w *World) chance(oneIn int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.faults.IntN(oneIn) == 0
}

// Run runs the world from its beginning to its end.
func (w *World) Run(steps int) {
	w.addAgentPod()
	w.addStrangers()
	w.kubelet.Up()
	w.startAgent()
	for range steps {
		w.step()
		w.check()
		if len(w.failures) > 0 {
			break
		}
	}
	if len(w.failures) == 0 {
		w.converge()
	}
	w.end()
}

// addAgentPod puts the agent's own pod on the node.
func (w *World) addAgentPod() {
	p := &pod{Pod: &kubelet.Pod{UID: "00000000-0000-4000-a000-000000000000", Namespace: "kube-system", Name: agentPod}, bound: true, inAPI: true}
	w.mu.Lock()
	w.pods[p.UID] = p
	w.mu.Unlock()
	w.putPod(p)
	w.kubelet.Add(p.Pod)
}

// strangerInfix is how a vendor's plugin numbers shares in IDs.
const strangerInfix = "::"

// addStrangers has, on some nodes, pods that another plugin gave devices before there
// was an agent.
func (w *World) addStrangers() {
	if w.random.IntN(4) > 0 {
		return
	}
	devices := w.machine.devices
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		d := devices[name]
		if d.Open || len(d.Offers) == 0 || len(d.Offers[0].IDs) > 1 || d.Offers[0].Members > 1 || d.PartOf != nil && d.Name != d.Silicon() || w.random.IntN(2) == 0 {
			continue
		}
		id := d.Offers[0].IDs[0]
		if d.Family == "nvidia" && w.random.IntN(3) == 0 {
			id += strangerInfix + "0"
		}
		w.made++
		p := &pod{own: true, bound: true, inAPI: true, Pod: &kubelet.Pod{
			UID: types.UID(fmt.Sprintf("%08x-0000-4000-b000-%012x", w.made, w.made)), Namespace: namespace, Name: fmt.Sprintf("old-%d", w.made),
			Grace: time.Duration(1+w.random.IntN(29)) * time.Second, Stubborn: w.random.IntN(2) == 0, Requests: map[string]int{d.Offers[0].Resource: 1},
		}}
		w.log("pod %s has %s of another plugin's", p, id)
		w.mu.Lock()
		w.pods[p.UID] = p
		w.mu.Unlock()
		w.putPod(p)
		if err := w.kubelet.Had(p.Pod, map[string][]string{d.Offers[0].Resource: {id}}); err != nil {
			w.fail("pod %s: %v", p, err)
		}
		w.saw("anotherPlugin")
	}
}

// podsOfNode answers the kubelet.
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

func (w *World) isDown() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ongoing["apiDown"] != nil
}

// podDone is told by the kubelet that a pod has ended, or was rejected.
func (w *World) podDone(p *kubelet.Pod, why error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if one := w.pods[p.UID]; one != nil {
		one.ended = true
	}
}

// putPod makes the API server have a pod as it is.
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
		limits[corev1.ResourceName(resource)] = quantity(int64(n))
	}
	spec.Containers[0].Resources.Limits = limits
	if p.Init {
		spec.Containers[0].Resources.Limits = nil
		spec.InitContainers = []corev1.Container{{Name: "init", Resources: corev1.ResourceRequirements{Limits: limits}}}
	}
	if p.Grace > 0 {
		seconds := int64(p.Grace / time.Second)
		spec.TerminationGracePeriodSeconds = &seconds
	}
	w.server.Put(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID}, Spec: spec})
}

// makePod makes a pod: with claims of its own, with one that others have too, or
// with classic resources.
func (w *World) makePod() {
	w.made++
	p := &pod{own: true, Pod: &kubelet.Pod{
		UID: types.UID(fmt.Sprintf("%08x-0000-4000-b000-%012x", w.made, w.made)), Namespace: namespace, Name: fmt.Sprintf("pod-%d", w.made),
		Grace: time.Duration(1+w.random.IntN(29)) * time.Second, Stubborn: w.random.IntN(2) == 0,
	}}
	if w.random.IntN(3) == 0 {
		p.Life = time.Duration(1+w.random.IntN(40)) * time.Second
		p.Restarts = w.random.IntN(3)
	}
	resources := slices.Sorted(maps.Keys(w.kubelet.Allocatable()))
	switch {
	case len(resources) > 0 && w.random.IntN(2) == 0 || !w.dra():
		if len(resources) == 0 {
			return
		}
		p.Requests = map[string]int{pick(w.random, resources...): 1 + w.random.IntN(2)}
		p.Init = w.random.IntN(6) == 0
	case w.random.IntN(4) == 0:
		p.own = false
		p.Claims = []string{fmt.Sprintf("shared-%d", w.random.IntN(2))}
		if w.server.Claim(namespace, p.Claims[0]) == nil {
			w.makeClaim(p.Claims[0])
		}
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
	w.submit(p)
}

// submit has the API server and the scheduler know of a pod.
func (w *World) submit(p *pod) {
	w.log("cluster: pod %s is made: claims %v, requests %v, init %v", p, short(p.Claims), p.Requests, p.Init)
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
			capacity, amount = discovery.Shares, quantity(1)
		}
		amount.Mul(int64(1 + w.random.IntN(2)))
		claim.Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{capacity: amount}}
	}
	w.server.Put(claim)
}

func newClaim(name string, count int64) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{{Name: "devices", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: className, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count,
		}}},
	}}}
}

// bind has a pod scheduled to the node if there is room.
func (w *World) bind(p *pod) {
	if p.bound || p.deleted || w.isDown() {
		return
	}
	for resource, n := range p.Requests {
		if w.kubelet.Allocatable()[resource]-w.requested(resource) < n {
			return
		}
	}
	if !w.schedule(p) {
		return
	}
	w.mu.Lock()
	p.bound = true
	w.mu.Unlock()
	w.putPod(p)
	w.log("scheduler: pod %s is bound", p)
	w.kubelet.Add(p.Pod)
}

// requested returns how much of a resource bound pods request.
func (w *World) requested(resource string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.pods {
		if p.bound && p.inAPI && !p.ended {
			n += p.Requests[resource]
		}
	}
	return n
}

// deletePod deletes a pod, at once and whatever its containers do with force.
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
		w.log("cluster: pod %s is deleted, force %v", p, force)
	}
	w.kubelet.Delete(p.UID, force)
	if gone {
		w.forget(p)
	}
}

// forget removes a pod from the API server.
func (w *World) forget(p *pod) {
	w.server.Delete(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}})
	w.release(p)
	w.mu.Lock()
	defer w.mu.Unlock()
	p.inAPI = false
	delete(w.pods, p.UID)
}

// tend does what the cluster does by itself: it schedules pods that wait, and
// removes those that have ended.
func (w *World) tend() {
	for _, p := range w.cluster() {
		w.mu.Lock()
		ended, bound, deleted := p.ended, p.bound, p.deleted
		w.mu.Unlock()
		if deleted {
			w.kubelet.Delete(p.UID, false) // which may have been down
		}
		switch {
		case w.isDown() || p.Namespace != namespace:
		case ended:
			w.forget(p)
		case !bound:
			w.bind(p)
		}
	}
	w.finish(time.Now())
}

// cluster returns the pods that there are, in order.
func (w *World) cluster() (all []*pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		all = append(all, w.pods[uid])
	}
	return all
}

// finish ends the faults whose time is over.
func (w *World) finish(now time.Time) {
	w.mu.Lock()
	var ends []string
	for name, o := range w.ongoing {
		if !now.Before(o.until) {
			ends = append(ends, name)
		}
	}
	w.mu.Unlock()
	slices.Sort(ends)
	for _, name := range ends {
		w.mu.Lock()
		o := w.ongoing[name]
		delete(w.ongoing, name)
		w.mu.Unlock()
		w.log("fault ends: %s", name)
		o.end()
	}
}

// end ends the world, and returns when nothing of it goes on.
func (w *World) end() {
	for _, i := range w.all {
		i.cancel()
	}
	w.host.Release()
	w.disk.SetFault(nil)
	w.server.SetFault(nil)
	for _, i := range w.all {
		<-i.done
	}
	w.kubelet.Down()
	w.server.EndWatches()
}

// History returns all that happened, a line for each.
func (w *World) History() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Join(w.history, "\n") + "\n"
}
