// Package kubelet is a model of a kubelet with its container runtime, for
// simulations: pods with their containers, DRA as Kubernetes 1.34 to 1.37 have
// it, the device-plugin API as 1.31 to 1.37 have it, PodResources, checkpoints
// and restarts. Where versions differ, it does as its own does. It is no part of
// the product.
package kubelet

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// Config says what a kubelet is, and what it has.
type Config struct {
	Minor  int // of its version: 31 to 37
	Node   string
	Driver string // the name of the DRA driver that the model is about
	Client kubernetes.Interface

	// Pods returns the pods that the API server has bound to the node, or why
	// it cannot be asked.
	Pods func() ([]*Pod, error)

	// Start starts a container in the runtime: it returns what the container
	// has of the CDI devices and device nodes, or why it cannot be started.
	Start func(c *Container) error

	// Lacks is told when a list is without an ID that an active pod has.
	Lacks func(pod *Pod, resource, id string)

	Ended func(c *Container)        // a container has ended
	Done  func(pod *Pod, why error) // a pod has ended, or was rejected
	Wipe  func()                    // deletes the node's slices
	Log   func(format string, args ...any)

	Random *rand.Rand // used under the kubelet's lock alone
}

// Pod is a pod with one container that matters.
type Pod struct {
	UID             types.UID
	Namespace, Name string
	Static          bool           // not of the API server
	Claims          []string       // names of ResourceClaims
	Group           string         // the name of its PodGroup, "" if it has none
	Requests        map[string]int // of classic resources
	Init            bool           // it is an init container, and another waits for its end
	Grace           time.Duration  // until its container is killed
	Stubborn        bool           // its container uses up the grace
	Life            time.Duration  // until its container ends by itself; 0: it does not
	Restarts        int            // how often its container ends and is started anew
}

func (p *Pod) String() string { return p.Namespace + "/" + p.Name }

// Container is what the runtime runs.
type Container struct {
	Pod     *Pod
	Claims  map[types.UID][]string     // CDI devices by claim
	Names   map[types.UID]string       // of the claims
	Devices map[string][]string        // classic IDs by resource
	Nodes   []string                   // paths of device nodes, of classic devices
	Listed  map[string]map[string]bool // by resource, the IDs of its last list

	// Ending says when the kubelet last asked to unprepare claims, or that failed. To 1.36
	// it takes them for prepared all the same, and does not ask again for another pod
	// (pkg/kubelet/cm/dra/manager.go, prepareResources and unprepareResources).
	Ending map[types.UID]time.Time

	unprepared map[types.UID]int // how often each claim was before
	asked      map[types.UID]int // how often that was asked for before

	// Start notes this.
	Note any
}

// Kubelet is a model of a kubelet. Its checkpoints and the runtime's containers
// are kept while it restarts.
type Kubelet struct {
	config  Config
	network network

	mu      sync.Mutex
	up      bool
	ready   bool // the API server has said which pods there are
	ctx     context.Context
	cancel  context.CancelFunc
	group   sync.WaitGroup
	workers map[types.UID]*worker

	// DRA.
	plugins []*plugin             // in the order of their registration
	claims  map[string]*claimInfo // by namespace/name; its checkpoint is written with each change
	refuses bool                  // registrations

	unprepared map[types.UID]int // how often each claim was
	asked      map[types.UID]int // how often that was asked for

	// The device-plugin API.
	endpoints map[string][]*endpoint // by resource; the last is called
	named     map[string]*endpoint   // by resource: which has its name, to 1.36
	healthy   map[string]map[string]bool
	lists     map[string]map[string]bool        // the last list of each resource, whatever became of who sent it
	devices   map[types.UID]map[string][]string // allocated, by pod and resource: the checkpoint
	nodesOf   map[types.UID]map[string][]string // device nodes that Allocate answered, likewise
	pending   map[string]map[string]types.UID   // IDs of Allocate calls in flight
	admission chan struct{}                     // taken while a pod is admitted, as pods are one after another
	known     map[string]bool                   // resources that were ever registered

	// The runtime's.
	containers map[types.UID]*Container
	sandboxes  map[types.UID]bool
}

// New returns a kubelet that is down.
func New(config Config) *Kubelet {
	return &Kubelet{
		config: config, claims: make(map[string]*claimInfo), workers: make(map[types.UID]*worker),
		devices: make(map[types.UID]map[string][]string), nodesOf: make(map[types.UID]map[string][]string),
		containers: make(map[types.UID]*Container), sandboxes: make(map[types.UID]bool), known: make(map[string]bool), unprepared: make(map[types.UID]int), asked: make(map[types.UID]int),
		healthy: make(map[string]map[string]bool), lists: make(map[string]map[string]bool), endpoints: make(map[string][]*endpoint), named: make(map[string]*endpoint), pending: make(map[string]map[string]types.UID),
		admission: make(chan struct{}, 1),
	}
}

func (k *Kubelet) log(format string, args ...any) { k.config.Log("kubelet: "+format, args...) }

// Up starts the kubelet, which goes on with what its checkpoints and the runtime
// have.
func (k *Kubelet) Up() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.up {
		return
	}
	k.log("starts, version 1.%d", k.config.Minor)
	k.up, k.ready = true, false
	k.ctx, k.cancel = context.WithCancel(context.Background())
	k.plugins = nil
	for _, c := range k.claims {
		c.prepared = false // which the checkpoint does not say (pkg/kubelet/cm/dra/state)
		c.unpreparing = false
	}
	k.endpoints, k.healthy = make(map[string][]*endpoint), make(map[string]map[string]bool)
	clear(k.named)
	for resource := range k.known {
		k.healthy[resource] = nil
	}
	k.pending = make(map[string]map[string]types.UID)
	ctx := k.ctx
	k.group.Go(func() { k.wipe(ctx) })
	k.group.Go(func() { k.watchPlugins(ctx) })
	k.group.Go(func() { k.syncPods(ctx) })
	k.group.Go(func() { k.reconcile(ctx) })
}

// wipe deletes the node's slices, as soon as the API server lets it.
func (k *Kubelet) wipe(context.Context) {
	if k.config.Minor >= 32 {
		k.config.Wipe()
	}
}

// Down stops the kubelet and returns when nothing of it goes on. Containers run
// on.
func (k *Kubelet) Down() {
	k.mu.Lock()
	if !k.up {
		k.mu.Unlock()
		return
	}
	k.log("stops")
	k.up = false
	k.cancel()
	for _, all := range k.endpoints {
		for _, e := range all {
			e.lose()
		}
	}
	for _, p := range k.plugins {
		p.conn.Close()
	}
	k.mu.Unlock()
	k.group.Wait()
	k.mu.Lock()
	clear(k.workers)
	k.plugins = nil
	k.mu.Unlock()
}

// IsUp reports whether the kubelet runs.
func (k *Kubelet) IsUp() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.up
}

// Reboot ends all containers; the kubelet must be down. Its checkpoints stay.
func (k *Kubelet) Reboot() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.containers {
		k.config.Ended(c)
	}
	clear(k.containers)
	clear(k.sandboxes)
}

// LoseCheckpoints forgets what the kubelet has written down, as an administrator
// does who removes it; the kubelet must be down. It reports whether there were
// claims in it.
func (k *Kubelet) LoseCheckpoints(dra, classic bool) (claims bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if dra {
		claims = len(k.claims) > 0
		clear(k.claims)
	}
	if classic {
		clear(k.devices)
		clear(k.nodesOf)
		clear(k.known)
	}
	return claims
}

// Refuse says whether the kubelet refuses drivers that register from now on.
func (k *Kubelet) Refuse(refuses bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refuses = refuses
}

// Containers returns the containers that run.
func (k *Kubelet) Containers() []*Container {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.SortedFunc(maps.Values(k.containers), func(a, b *Container) int {
		return compareUID(a.Pod.UID, b.Pod.UID)
	})
}

func compareUID(a, b types.UID) int {
	if a < b {
		return -1
	}
	if a > b {
		return 1
	}
	return 0
}

// Idle reports whether the kubelet has no pod, no claim and no container, and if
// not, what it has.
func (k *Kubelet) Idle() (string, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case len(k.workers) > 0:
		for _, w := range k.workers {
			if w.terminal || w.ending() {
				return fmt.Sprintf("pod %s is %s: %v", w.pod, w.state, w.why), false
			}
		}
	case len(k.containers) > 0:
		return fmt.Sprintf("%d containers run", len(k.containers)), false
	case len(k.claims) > 0:
		for name, c := range k.claims {
			return fmt.Sprintf("claim %s is not unprepared: %v", name, c.why), false
		}
	}
	return "", true
}

// HasClaim reports whether the kubelet has not unprepared a claim since a container
// was started with it.
func (k *Kubelet) HasClaim(c *Container, uid types.UID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.unprepared[uid] == c.unprepared[uid]
}

// GaveUp reports whether the kubelet has asked, since a container was started with a claim,
// that the claim be unprepared. It may not know yet that this was done.
func (k *Kubelet) GaveUp(c *Container, uid types.UID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.asked[uid] != c.asked[uid]
}

// HasDevices returns the classic devices that the kubelet's books have for a pod.
func (k *Kubelet) HasDevices(uid types.UID) map[string][]string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.devices[uid])
}

// Had has a pod be one that was there before any agent of ours: another plugin gave
// it devices, and its container runs. The kubelet must be down.
func (k *Kubelet) Had(pod *Pod, devices map[string][]string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := &Container{Pod: pod, Devices: devices, Listed: maps.Clone(k.lists), unprepared: make(map[types.UID]int), asked: make(map[types.UID]int)}
	if err := k.config.Start(c); err != nil {
		return err
	}
	k.devices[pod.UID], k.containers[pod.UID], k.sandboxes[pod.UID] = maps.Clone(devices), c, true
	for resource := range devices {
		k.known[resource] = true
	}
	return nil
}

// Prepared returns the claims that the kubelet has CDI devices of, by their UIDs.
func (k *Kubelet) Prepared() map[types.UID][]string {
	k.mu.Lock()
	defer k.mu.Unlock()
	prepared := make(map[types.UID][]string)
	for _, info := range k.claims {
		prepared[info.uid] = info.cdi
	}
	return prepared
}

// Allocatable returns how many healthy devices there are of each resource.
func (k *Kubelet) Allocatable() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make(map[string]int)
	if k.up {
		for resource, ids := range k.healthy {
			all[resource] = len(ids)
		}
	}
	return all
}

// sleep waits, and reports whether the context goes on.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// allocatedHere reports whether a claim has devices of the model's driver.
func (k *Kubelet) allocatedHere(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == k.config.Driver
	})
}
