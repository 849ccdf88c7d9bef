// Package simulation runs whole agents of a node against models of a kubelet, an
// API server, a kernel and a disk, with faults of each. A seed fixes the
// configuration, the pods, the faults, when they come, and, with the changes of
// scheduling_test.go, which goroutine goes first. It is no part of the product.
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

	handsOver  bool            // the administrator wants devices handed over
	handsSince time.Time       // since when all agents know that
	disturbed  map[string]bool // functions that vanished in this boot, so that the kernel has forgotten their drivers

	mu        sync.Mutex
	touched   map[string]time.Time // by function: when an agent last began to take it, or to give it back
	handed    map[string]bool      // by function: a consumer had it, by what agents wrote down, since it got the name that it has
	resets    bool                 // the administrator ever wanted functions reset
	processes []*running
	history   []string
	seen      map[string]int // faults that happened
	faults    *rand.Rand     // of all goroutines
	failures  []string
	wiped     bool            // somebody removed or damaged what the agent wrote down
	forgot    bool            // the kubelet forgot claims
	swapped   bool            // a card was replaced by another
	parted    map[string]bool // silicon of several functions of which one was gone
	lost      bool            // there may be specs missing that nobody knows of any more
	hurt      bool            // an agent died before it could write what was missing
	healed    time.Time
	portions  map[portion]part
	recorded  map[portion][]byte // the records of portions when an agent last had to learn their size from these

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
		seen: make(map[string]int), portions: make(map[portion]part), recorded: make(map[portion][]byte), pods: make(map[types.UID]*pod), parted: make(map[string]bool), ongoing: make(map[string]*ongoing),
		touched: make(map[string]time.Time), handed: make(map[string]bool), disturbed: make(map[string]bool),
		server: apiserver.New(), lock: lock{waiting: make(map[*incarnation]bool), writing: make(map[*incarnation]int)},
	}
	w.configure()
	w.host = kernel.New(w.machine.text)
	w.host.Drive(w.machine.functions...)
	w.host.Changed = w.announce
	w.disk = disk.New(func(line string) { w.log("disk: %s", line) }, kubeletRoot+"/plugins", kubeletRoot+"/plugins_registry", "/var/run", "/run")
	w.kubelet = kubelet.New(kubelet.Config{
		Minor: w.minor, Node: nodeName, Driver: discovery.Domain, Client: w.server.Client(nil),
		Pods: w.podsOfNode, Start: w.startContainer, Done: w.podDone, Log: w.log,
		Ended: func(c *kubelet.Container) {
			w.log("runtime: container of pod %s has ended", c.Pod)
			w.linger(c)
		},
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

func (w *World) isDown() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ongoing["apiDown"] != nil
}

// tend does what the cluster does by itself: it schedules pods that wait, and
// removes those that have ended.
func (w *World) tend() {
	w.forgetEnded()
	for _, p := range w.cluster() {
		w.mu.Lock()
		bound, deleted := p.bound, p.deleted
		w.mu.Unlock()
		if deleted {
			w.kubelet.Delete(p.UID, false) // which may have been down
		}
		if !bound && p.Namespace == namespace {
			w.bind(p)
		}
	}
	w.finish(time.Now())
	w.reap(time.Now())
}

// forgetEnded removes pods that have ended.
func (w *World) forgetEnded() {
	for _, p := range w.cluster() {
		w.mu.Lock()
		ended := p.ended
		w.mu.Unlock()
		if ended && p.Namespace == namespace && !w.isDown() {
			w.forget(p)
		}
	}
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
	w.host.Unstick()
	w.host.Reboot()
	w.disk.SetFault(nil)
	w.server.SetFault(nil)
	for _, i := range w.all {
		<-i.done
		for w.lock.writes(i) {
			time.Sleep(lockPause)
		}
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
