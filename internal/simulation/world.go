// Package simulation runs whole agents of a node against models of a kubelet, an
// API server, a kernel and a disk, with faults of each. A seed fixes the
// configuration, the pods, the faults, when they come, and, with the changes of
// scheduling_test.go, which goroutine goes first. It is no part of the product.
package simulation

import (
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/apiserver"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/cluster"
	"chandler.dev/internal/simulation/damage"
	"chandler.dev/internal/simulation/disk"
	"chandler.dev/internal/simulation/history"
	"chandler.dev/internal/simulation/kernel"
	"chandler.dev/internal/simulation/kubelet"
	"chandler.dev/internal/simulation/machine"
	"chandler.dev/internal/simulation/supervisor"
	"chandler.dev/internal/simulation/usage"
)

const (
	nodeName = "node"
	agentPod = "chandler"
)

// World is a node in a cluster, with everything that happens to the node. Faults and checks are functions
// on a World; its methods are what these have in common, and the steps of a run.
type World struct {
	random *rand.Rand // for the root goroutine

	history *history.History
	chance  *chance.Chance // for all goroutines

	machine  *machine.Machine
	cards    []machine.Card // of the machine, with their present nodes
	forms    []machine.Form // the devices under all settings of the administrator so far, the present last
	settings agent.Settings
	minor    int  // minor version of Kubernetes
	surges   bool // during an upgrade, both agents run for a while

	server  *apiserver.Server
	cluster *cluster.Cluster
	kubelet *kubelet.Kubelet
	host    *kernel.Host
	disk    *disk.Disk

	supervisor *supervisor.Supervisor // of MPS daemons

	agents *agents.Node

	usage   *usage.Tracker // of the devices by containers
	damage  *damage.Damage // by faults
	lasting *lasting       // faults that go on
}

// NewWorld returns the world of a seed. Each world needs its own synctest bubble.
func NewWorld(seed uint64) *World {
	w := &World{
		random:  rand.New(rand.NewPCG(seed, 1)),
		history: history.New(), chance: chance.New(rand.New(rand.NewPCG(seed, 2))),
		server: apiserver.New(),
	}
	w.lasting = &lasting{random: w.random, history: w.history, ongoing: make(map[string]ongoing)}
	metadata, rescan := w.configureNode(seed)
	w.damage = damage.New(w.machine, w.history, func() bool { return w.lasting.goesOn(diskFault) })
	w.cluster = cluster.New(cluster.Config{
		Node: nodeName, Minor: w.minor, Server: w.server, History: w.history, Random: w.random, Bindings: rand.New(rand.NewPCG(seed, 4)),
		Down: w.isDown, Allocated: w.noteAllocation,
	})
	w.host = kernel.New(w.machine.Text)
	w.host.DriveFunctions(w.machine.Functions...)
	w.disk = disk.New(func(line string) { w.history.Log("disk: %s", line) }, agents.KubeletRoot+"/plugins", agents.KubeletRoot+"/plugins_registry", "/var/run", "/run")
	w.supervisor = supervisor.New(supervisor.Config{
		History: w.history, Chance: w.chance, Host: w.host, Disk: w.disk,
		Dir: agents.StateDir + "/sharing-daemons/nvidia", Serves: w.machine.Daemons,
		Boot: w.host.BootID, Wiped: w.damage.HasLostRecords,
	})
	w.supervisor.RestartProcess()
	w.kubelet = kubelet.New(kubelet.Config{
		Minor: w.minor, Node: nodeName, Driver: discovery.Domain, Client: w.server.Client(nil),
		Pods: w.cluster.BoundPods, Start: w.startContainer, Done: w.cluster.PodDone, Log: w.history.Log,
		Ended: func(c *kubelet.Container) {
			w.history.Log("runtime: container of pod %s has ended", c.Pod)
			w.usage.Processes.EndContainer(c)
		},
		Lacks: func(p *kubelet.Pod, resource, id string) {
			if w.history.FaultCount("stateWiped") == 0 {
				w.history.Fail("resource %s is listed without %s, which pod %s has", resource, id, p)
			}
		},
		Wipe:   func() { w.server.DeleteSlices(nodeName) },
		Random: rand.New(rand.NewPCG(seed, 3)),
	})
	w.cluster.Kubelet = w.kubelet
	w.agents = agents.New(agents.Config{
		Name: nodeName, Pod: "kube-system/" + agentPod, Server: w.server, Kubelet: w.kubelet, Host: w.host, Disk: w.disk, Supervisor: w.supervisor,
		Families: w.machine.Families, Rescan: rescan, NoMetadata: !metadata, History: w.history, Chance: w.chance, Watcher: watcher{w},
	})
	w.host.Changed = w.agents.SendUevent
	w.server.Put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}})
	w.usage = usage.New(usage.Config{
		Machine: w.machine, Host: w.host, Disk: w.disk, Server: w.server, Cluster: w.cluster, Kubelet: w.kubelet, Supervisor: w.supervisor,
		Lock: &w.agents.Lock, Damage: w.damage, History: w.history, Chance: w.chance,
		Boot: w.host.BootID, Forms: func() []machine.Form { return w.forms }, CardOf: w.cardOf,
	})
	w.drawConfiguration()
	return w
}

// configureNode draws the properties of the node and the cluster. The returned ones concern the agents
// alone: whether they write metadata files, and the interval of their scans.
func (w *World) configureNode(seed uint64) (metadata bool, rescan time.Duration) {
	w.minor = chance.PickOne(w.random, 31, 34, 36, 37, 37)
	w.server.Serve(w.minor >= 34)
	all, _ := machine.All()
	w.machine = chance.PickOne(w.random, all...)
	w.cards = slices.Clone(w.machine.Cards)
	metadata = w.random.IntN(3) > 0
	w.surges = w.random.IntN(2) == 0
	rescan = time.Duration(20+w.random.IntN(40)) * time.Second
	w.server.SetFeatures(featuresOf(w.minor))
	w.history.Log("seed %d: Kubernetes 1.%d, host %s, metadata %v, surges %v", seed, w.minor, w.machine.Name, metadata, w.surges)
	return metadata, rescan
}

// featuresOf returns the default features of an API server of a version.
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

// Result is the result of a run: the number of steps, and of faults that struck.
type Result struct{ Steps, Struck int }

// Run runs the world from start to end, for at most the given number of steps.
func (w *World) Run(steps int) (r Result) {
	w.cluster.AddAgentPod(agentPod)
	addStrangers(w)
	w.kubelet.StartKubelet()
	w.startAgent()
	for range steps {
		r.Steps++
		if w.takeStep() {
			r.Struck++
		}
		w.check()
		if len(w.history.AllFailures()) > 0 {
			break
		}
	}
	if len(w.history.AllFailures()) == 0 {
		w.converge()
	}
	w.end()
	return r
}

// check checks the invariants.
func (w *World) check() {
	checkCalls(w)
	w.usage.Check()
}

// startContainer starts a container of a pod.
func (w *World) startContainer(c *kubelet.Container) error {
	err := w.usage.StartContainer(c)
	if err == nil {
		w.cluster.PodStarted(c.Pod.UID)
	}
	return err
}

// isDown reports whether the API server is down.
func (w *World) isDown() bool { return w.lasting.goesOn("apiDown") }

// end ends the world, and returns when all its goroutines have ended.
func (w *World) end() {
	for _, i := range w.agents.All() {
		i.Stop()
	}
	w.host.Release()
	w.host.ReleaseWrites()
	w.supervisor.Kill(true)
	w.host.Reboot()
	w.disk.SetFault(nil)
	w.server.SetFault(nil)
	for _, i := range w.agents.All() {
		i.WaitForWrites()
	}
	w.supervisor.Wait()
	w.kubelet.StopKubelet()
	w.server.EndWatches()
}

// tendCluster does the cluster's background work, and ends faults and processes whose time is over.
func (w *World) tendCluster() {
	w.cluster.TendPods()
	w.lasting.endFaults(time.Now())
	w.usage.Processes.EndLingering(time.Now())
}

// open returns the number of pods, without the agent's own.
func (w *World) open() int { return len(w.cluster.AllPods()) - 1 }
