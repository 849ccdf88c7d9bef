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

// Config holds the version and the dependencies of a kubelet.
type Config struct {
	Minor  int // minor version of Kubernetes: 31 to 37
	Node   string
	Driver string // the name of the modelled DRA driver
	Client kubernetes.Interface

	// Pods returns the pods that are bound to the node in the API server, or an error if the API
	// server does not answer.
	Pods func() ([]*Pod, error)

	// Start starts a container in the runtime, or returns an error. It may set the container's
	// Note.
	Start func(c *Container) error

	// Lacks is called when a list lacks an ID that an active pod has.
	Lacks func(pod *Pod, resource, id string)

	Ended func(c *Container)        // called when a container has ended
	Done  func(pod *Pod, why error) // called when a pod has ended or was rejected
	Wipe  func()                    // deletes the node's slices
	Log   func(format string, args ...any)

	Random *rand.Rand // used only with the kubelet's lock held
}

// Pod is a pod with one relevant container.
type Pod struct {
	UID             types.UID
	Namespace, Name string
	Static          bool           // not in the API server
	Claims          []string       // names of ResourceClaims
	Group           string         // the name of its PodGroup, "" if none
	Requests        map[string]int // number of devices by extended resource
	Init            bool           // the container is an init container, and another container waits for its end
	Grace           time.Duration  // time until its container is killed
	Stubborn        bool           // its container runs until the end of the grace period
	Life            time.Duration  // time until its container ends by itself; 0 means never
	Restarts        int            // how many times its container ends and is restarted

	started bool // its container has run with its devices; guarded by the kubelet's lock
}

func (p *Pod) String() string { return p.Namespace + "/" + p.Name }

// Container is a running container.
type Container struct {
	Pod     *Pod
	Claims  map[types.UID][]string     // CDI devices by claim UID
	Names   map[types.UID]string       // names of the claims
	Devices map[string][]string        // device plugin IDs by resource
	Nodes   []string                   // paths of the nodes of devices from the device plugin API
	Listed  map[string]map[string]bool // by resource, the IDs of the last list at the start
	Again   bool                       // an earlier container of the pod had the same devices

	// Ending is the time of the kubelet's last Unprepare call for a claim that failed or had not
	// returned. Up to 1.36, the kubelet treats such claims as prepared, and does not prepare them
	// again for another pod (pkg/kubelet/cm/dra/manager.go, prepareResources and
	// unprepareResources).
	Ending map[types.UID]time.Time

	unprepared map[types.UID]int // the number of completed Unprepare calls at the start, by claim
	asked      map[types.UID]int // the number of Unprepare calls at the start, by claim

	// Note is data of Config.Start.
	Note any
}

// Kubelet is a model of a kubelet. A restart keeps the checkpoints and the containers of the
// runtime.
type Kubelet struct {
	config  Config
	network network

	mu      sync.Mutex
	up      bool
	ready   bool // the API server has listed the pods
	ctx     context.Context
	cancel  context.CancelFunc
	group   sync.WaitGroup
	workers map[types.UID]*worker

	dra       draManager
	devices   deviceManager
	admission chan struct{} // has a value while a pod is admitted: pods are admitted one after another

	// The container runtime.
	containers map[types.UID]*Container
	sandboxes  map[types.UID]bool
}

// New returns a stopped kubelet.
func New(config Config) *Kubelet {
	k := &Kubelet{
		config: config, workers: make(map[types.UID]*worker), admission: make(chan struct{}, 1),
		containers: make(map[types.UID]*Container), sandboxes: make(map[types.UID]bool),
	}
	k.dra = draManager{
		kubelet: k, claims: make(map[string]*claimInfo),
		forgotten: make(map[types.UID]bool), unprepared: make(map[types.UID]int), asked: make(map[types.UID]int),
	}
	k.devices = deviceManager{
		kubelet: k, endpoints: make(map[string][]*endpoint), named: make(map[string]*endpoint),
		healthy: make(map[string]map[string]bool), lists: make(map[string]map[string]bool), known: make(map[string]bool),
		allocated: make(map[types.UID]map[string][]string), nodesOf: make(map[types.UID]map[string][]string), pending: make(map[string]map[string]types.UID),
	}
	return k
}

func (k *Kubelet) log(format string, args ...any) { k.config.Log("kubelet: "+format, args...) }

// StartKubelet starts the kubelet with the state of its checkpoints and the runtime.
func (k *Kubelet) StartKubelet() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.up {
		return
	}
	k.log("starts, version 1.%d", k.config.Minor)
	k.up, k.ready = true, false
	k.ctx, k.cancel = context.WithCancel(context.Background())
	k.dra.plugins = nil
	for _, c := range k.dra.claims {
		c.prepared = false // the checkpoint does not contain this (pkg/kubelet/cm/dra/state)
		c.unpreparing = false
	}
	k.devices.endpoints, k.devices.healthy = make(map[string][]*endpoint), make(map[string]map[string]bool)
	clear(k.devices.named)
	for resource := range k.devices.known {
		k.devices.healthy[resource] = nil
	}
	k.devices.pending = make(map[string]map[string]types.UID)
	ctx := k.ctx
	k.group.Go(func() { k.wipeSlices(ctx) })
	k.group.Go(func() { k.dra.watchPlugins(ctx) })
	k.group.Go(func() { k.syncPods(ctx) })
	k.group.Go(func() { k.dra.reconcileClaims(ctx) })
}

// wipeSlices deletes the node's slices as soon as the API server allows it.
func (k *Kubelet) wipeSlices(context.Context) {
	if k.config.Minor >= 32 {
		k.config.Wipe()
	}
}

// StopKubelet stops the kubelet and returns when all its goroutines have ended. Containers keep
// running.
func (k *Kubelet) StopKubelet() {
	k.mu.Lock()
	if !k.up {
		k.mu.Unlock()
		return
	}
	k.log("stops")
	k.up = false
	k.cancel()
	for _, all := range k.devices.endpoints {
		for _, e := range all {
			e.endStream()
		}
	}
	for _, p := range k.dra.plugins {
		p.conn.Close()
	}
	k.mu.Unlock()
	k.group.Wait()
	k.mu.Lock()
	clear(k.workers)
	k.dra.plugins = nil
	k.mu.Unlock()
}

// IsUp reports whether the kubelet runs.
func (k *Kubelet) IsUp() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.up
}

// Reboot ends all containers. The kubelet must be down. Its checkpoints remain.
func (k *Kubelet) Reboot() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.containers {
		k.config.Ended(c)
	}
	clear(k.containers)
	clear(k.sandboxes)
}

// LoseCheckpoints deletes the kubelet's checkpoints, as an administrator may. The kubelet must be
// down.
func (k *Kubelet) LoseCheckpoints(dra, classic bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if dra {
		for _, info := range k.dra.claims {
			k.dra.forgotten[info.uid] = true
		}
		clear(k.dra.claims)
	}
	if classic {
		clear(k.devices.allocated)
		clear(k.devices.nodesOf)
		clear(k.devices.known)
	}
}

// ForgottenClaims returns the claims that the kubelet has lost, and will not unprepare.
func (k *Kubelet) ForgottenClaims() map[types.UID]bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.dra.forgotten)
}

// RefuseDrivers sets whether the kubelet refuses drivers that register from now on.
func (k *Kubelet) RefuseDrivers(refuses bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dra.refuses = refuses
}

// Containers returns the running containers, sorted by the UIDs of their pods.
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

// IsIdle reports whether the kubelet has no pod, claim or container. If not, IsIdle returns a
// description of the remaining ones.
func (k *Kubelet) IsIdle() (string, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case len(k.workers) > 0:
		for _, w := range k.workers {
			if w.terminal || w.isEnding() {
				return fmt.Sprintf("pod %s is %s: %v", w.pod, w.state, w.why), false
			}
		}
	case len(k.containers) > 0:
		return fmt.Sprintf("%d containers run", len(k.containers)), false
	case len(k.dra.claims) > 0:
		for name, c := range k.dra.claims {
			return fmt.Sprintf("claim %s is not unprepared: %v", name, c.why), false
		}
	}
	return "", true
}

// HasClaim reports whether the kubelet has not unprepared a claim since the start of a container
// with the claim.
func (k *Kubelet) HasClaim(c *Container, uid types.UID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.dra.unprepared[uid] == c.unprepared[uid]
}

// HadUnprepare reports whether the kubelet has called Unprepare for a claim before the start of the
// container.
func (c *Container) HadUnprepare(uid types.UID) bool { return c.asked[uid] > 0 }

// GaveUp reports whether the kubelet has called Unprepare for a claim since the start of a
// container with the claim. The kubelet may not have the answer yet.
func (k *Kubelet) GaveUp(c *Container, uid types.UID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.dra.asked[uid] != c.asked[uid]
}

// HasDevices returns a pod's devices in the checkpoint of the device plugin API.
func (k *Kubelet) HasDevices(uid types.UID) map[string][]string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.devices.allocated[uid])
}

// AddEarlierPod adds a pod from the time before the first agent: another plugin allocated its
// devices, and its container runs. The kubelet must be down.
func (k *Kubelet) AddEarlierPod(pod *Pod, devices map[string][]string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := &Container{Pod: pod, Devices: devices, Listed: maps.Clone(k.devices.lists), unprepared: make(map[types.UID]int), asked: make(map[types.UID]int)}
	if err := k.config.Start(c); err != nil {
		return err
	}
	k.devices.allocated[pod.UID], k.containers[pod.UID], k.sandboxes[pod.UID] = maps.Clone(devices), c, true
	for resource := range devices {
		k.devices.known[resource] = true
	}
	return nil
}

// PreparedClaims returns the CDI devices of the kubelet's claims, by claim UID.
func (k *Kubelet) PreparedClaims() map[types.UID][]string {
	k.mu.Lock()
	defer k.mu.Unlock()
	prepared := make(map[types.UID][]string)
	for _, info := range k.dra.claims {
		prepared[info.uid] = info.cdi
	}
	return prepared
}

// AllocatableDevices returns the number of healthy devices of each resource.
func (k *Kubelet) AllocatableDevices() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make(map[string]int)
	if k.up {
		for resource, ids := range k.devices.healthy {
			all[resource] = len(ids)
		}
	}
	return all
}

// sleep waits, and returns false if the context ends first.
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
func (m *draManager) allocatedHere(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == m.kubelet.config.Driver
	})
}
