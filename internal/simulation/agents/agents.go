// Package agents runs whole agents of a node as processes that can be killed at any moment: between two
// changes of the disk or of the host, and while they wait. It models the node's lock. It starts and
// ends agents only when the caller wants it, and checks only what concerns the lock and the API server.
package agents

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"chandler.dev/cdi"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver"
	"chandler.dev/internal/simulation/apiserver"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/disk"
	"chandler.dev/internal/simulation/history"
	"chandler.dev/internal/simulation/kernel"
	"chandler.dev/internal/simulation/kubelet"
	"chandler.dev/internal/simulation/machine"
)

// Paths of the node.
const (
	KubeletRoot = "/var/lib/kubelet"
	StateDir    = KubeletRoot + "/plugins/chandler.dev"
	RunDir      = "/run/chandler"
	CDIRoot     = "/var/run/cdi"
)

// RecordFile returns the path of a claim's record.
func RecordFile(claim types.UID) string { return StateDir + "/claims/" + string(claim) + ".record" }

// SpecFile returns the path of a claim's CDI spec.
func SpecFile(claim types.UID) string {
	return CDIRoot + "/chandler.dev-claim_" + string(claim) + ".json"
}

// Watcher observes the agents. Any goroutine may call its methods.
type Watcher interface {
	// RecordRemoved is called before an agent of a boot removes the record of a claim.
	RecordRemoved(file, boot string)
	FileRenamed(file string)        // before an agent gives a file its name
	HostWritten(name, value string) // before an agent writes an attribute of the host
	LockAcquired()                  // when an agent has acquired the node's lock
	AgentDies()
}

// Config is what the agents of a node have in common.
type Config struct {
	Name       string
	Pod        string // namespace and name of the agent's pod
	Server     *apiserver.Server
	Kubelet    *kubelet.Kubelet
	Host       *kernel.Host
	Disk       *disk.Disk
	Supervisor http.RoundTripper // of sharing daemons
	Families   []*discovery.Family
	Rescan     time.Duration
	NoMetadata bool
	History    *history.History
	Chance     *chance.Chance
	Watcher    Watcher
}

// Node is a node with its agents.
type Node struct {
	Config
	Lock Lock

	agents int      // the number of agents so far; for the root goroutine
	living []*Agent // the agents that were neither killed nor told to end by the simulation; for the root goroutine
	mu     sync.Mutex
	all    []*Agent
}

// New returns a node without agents.
func New(config Config) *Node {
	return &Node{Config: config, Lock: Lock{waiting: make(map[*Agent]bool), writing: make(map[*Agent]int)}}
}

// All returns all agents so far, including those that have ended.
func (n *Node) All() []*Agent {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.all)
}

// LivingAgents returns the agents that the simulation has neither killed nor told to end, in the order of
// their starts. Only the root goroutine may call LivingAgents and the methods that change these agents.
func (n *Node) LivingAgents() []*Agent { return n.living }

// IsLiving reports whether the agent is one of the living agents.
func (n *Node) IsLiving(a *Agent) bool { return slices.Contains(n.living, a) }

// DropDead drops agents that have ended from the living agents.
func (n *Node) DropDead() { n.living = slices.DeleteFunc(n.living, (*Agent).IsDead) }

// End tells an agent to end. The agent is then no living agent.
func (n *Node) End(a *Agent) {
	a.Stop()
	n.living = slices.DeleteFunc(n.living, func(other *Agent) bool { return other == a })
}

// KillAll kills all agents, also agents that were told to end and have not ended yet.
func (n *Node) KillAll() {
	for _, a := range n.All() {
		a.Kill()
	}
	n.living = nil
}

// SendUevent sends an event of the kernel to all agents.
func (n *Node) SendUevent() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range n.all {
		a.SendUevent()
	}
}

// Agent is one process of the agent.
type Agent struct {
	Name  string
	Wrong atomic.Bool // its configuration is invalid

	node    *Node
	uid     types.UID
	boot    string
	cancel  context.CancelFunc
	process *kubelet.Process
	events  chan struct{} // events of the kernel
	changes chan agent.Change
	done    chan struct{} // closed when the agent has returned
	err     error         // the result of the agent; read after done

	dead      atomic.Bool
	limit     atomic.Int64 // the number of further changes of the disk before the process is killed, plus one; 0 means never
	hostLimit atomic.Int64 // the same for changes of the host's attributes
	power     bool         // the kill is a loss of power
}

// errKilled is the result of calls by a killed process.
var errKilled = errors.New("the process was killed")

// diskGate lets the process change the disk while the process lives.
func (a *Agent) diskGate(op disk.Op, name string) error {
	if a.dead.Load() {
		return disk.ErrDead
	}
	if op == disk.Remove && path.Ext(name) == ".record" {
		a.node.Watcher.RecordRemoved(name, a.boot)
	}
	if op == disk.Rename {
		a.node.Watcher.FileRenamed(name)
	}
	if (op.ChangesDisk() || op == disk.Sync || op == disk.SyncDir) && a.limit.Load() > 0 && a.limit.Add(-1) == 0 {
		a.node.History.Log("%s is killed before it can %s", a.Name, op)
		a.node.History.CountFault(map[bool]string{false: "agentKilledWriting", true: "powerLostWriting"}[a.power])
		a.Kill()
		return disk.ErrDead
	}
	return nil
}

// apiGate lets the process call the API server while the process lives.
func (a *Agent) apiGate(_ context.Context, call apiserver.Call) error {
	if a.dead.Load() {
		return errKilled
	}
	if call.ListsCluster(a.node.Name) {
		a.node.History.Fail("%s asks to %s with the selector %q, whose answer grows with the cluster", a.Name, call, call.Selector)
	}
	return nil
}

// Kill ends the process at once: nothing that the process does afterwards has an effect.
func (a *Agent) Kill() {
	if a.dead.Swap(true) {
		return
	}
	a.node.Watcher.AgentDies()
	a.node.Lock.releaseDead(a)
	a.cancel()
	a.process.Kill()
}

// Start describes the start of an agent.
type Start struct {
	Boot        string
	Settings    agent.Settings
	ConfigError error // the error if the configuration is invalid
	HasUID      bool  // the agent has the UID of its pod, as it needs beside another agent
}

// Start starts another agent on the node.
func (n *Node) Start(s Start) *Agent {
	n.agents++
	a := &Agent{node: n, Name: fmt.Sprintf("agent-%d", n.agents), boot: s.Boot, events: make(chan struct{}, 1), changes: make(chan agent.Change), done: make(chan struct{})}
	a.Wrong.Store(s.ConfigError != nil)
	if s.HasUID {
		a.uid = types.UID(fmt.Sprintf("00000000-0000-4000-9000-%012d", n.agents))
	}
	a.process = n.Kubelet.NewProcess(a.Name)
	logger := logr.New(&sink{history: n.History, prefix: a.Name + ": "})
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logger))
	a.cancel = cancel
	client := n.Server.Client(a.apiGate)
	config := agent.Config{
		Version: "simulated", NodeName: n.Name, PodUID: a.uid, Pod: n.Pod, BootID: s.Boot,
		FS: n.Host, Families: n.Families, Settings: s.Settings, ConfigError: s.ConfigError, Changes: a.changes, RescanInterval: n.Rescan,
		Uevents: a.forwardEvents, AllEvents: true, Client: client, StatusClient: client, ServedVersions: func(ctx context.Context) ([]string, error) { return n.Server.ServedVersions(ctx, a.apiGate) },
		Kubelet: agent.Kubelet{StartDRA: func(ctx context.Context, plugin kubeletplugin.DRAPlugin, options ...kubeletplugin.Option) (driver.Helper, error) {
			helper, err := a.process.StartDRA(ctx, plugin, options...)
			if err != nil {
				return nil, err
			}
			return helper, nil
		}},
		Lock: lockOf{&n.Lock, a}, KubeletRoot: KubeletRoot, StateDir: StateDir, RunDir: RunDir,
		CDI:            cdi.Dir{Path: CDIRoot},
		NoMetadata:     n.NoMetadata,
		ReadParameters: machine.ReadParameters,
		Write:          a.write,

		SharingPrograms: n.Supervisor,
	}
	config.Disk = n.Disk.View(a.diskGate)
	config.HostFiles.Dirs = discovery.FileDirs(n.Families)
	a.process.Succeeded = config.Lock.Awaited
	config.Kubelet.DevicePlugins = a.process
	config.Kubelet.Pods = a.process.Pods
	config.Kubelet.Allocated = a.process.AllocatedIDs
	n.mu.Lock()
	n.all = append(n.all, a)
	n.mu.Unlock()
	n.living = append(n.living, a)
	n.History.Log("%s starts in boot %s", a.Name, s.Boot)
	go func() {
		defer close(a.done)
		a.err = agent.Run(ctx, config)
		n.History.Log("%s has ended: %v", a.Name, a.err)
		a.Kill()
	}()
	return a
}

// forwardEvents forwards the kernel's events to the agent.
func (a *Agent) forwardEvents(ctx context.Context, events chan scan.Changes) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.events:
			scan.Changes{Everything: true}.Send(events)
		}
	}
}

// write changes the host for an agent.
func (a *Agent) write(name, value string) error {
	n := a.node
	if a.dead.Load() {
		return errKilled
	}
	if a.hostLimit.Load() > 0 && a.hostLimit.Add(-1) == 0 {
		n.History.Log("%s is killed before it can write %q to %s", a.Name, value, name)
		n.History.CountFault("agentKilledChanging")
		a.Kill()
		return errKilled
	}
	if !n.Lock.beginWrite(a) {
		n.History.Fail("%s writes %q to %s without the node's lock", a.Name, value, name)
	}
	defer n.Lock.endWrite(a)
	n.Watcher.HostWritten(name, value)
	latency := n.Chance.UpTo(200 * time.Millisecond)
	if n.Chance.OneIn(20) {
		latency = n.Chance.UpTo(5 * time.Second)
	}
	err := n.Host.Write(name, value, latency)
	n.History.Log("%s wrote %q to %s: %v", a.Name, value, name, err)
	return err
}

// Tell sends a change of the configuration to an agent, and reports whether the agent received it.
func (a *Agent) Tell(c agent.Change) bool {
	select {
	case a.changes <- c:
		return true
	case <-a.done:
	case <-time.After(time.Second):
	}
	return false
}

// SendUevent sends an event of the kernel to the agent.
func (a *Agent) SendUevent() {
	select {
	case a.events <- struct{}{}:
	default:
	}
}

// IsDead reports whether the agent has ended or was killed.
func (a *Agent) IsDead() bool { return a.dead.Load() }

// Stop tells the agent to end.
func (a *Agent) Stop() { a.cancel() }

// Wait waits until the agent has returned.
func (a *Agent) Wait() { <-a.done }

// WaitForWrites waits until the agent has returned, and its writes to the host have ended.
func (a *Agent) WaitForWrites() {
	<-a.done
	for a.node.Lock.isWriting(a) {
		time.Sleep(lockPause)
	}
}

// KillWriting lets the agent be killed before one of its next changes of the disk, alone or by a loss of
// power.
func (a *Agent) KillWriting(change int64, power bool) {
	a.power = power
	a.limit.Store(change + 1)
}

// KillChanging lets the agent be killed before one of its next changes of the host.
func (a *Agent) KillChanging(change int64) { a.hostLimit.Store(change) }

// LostPower reports whether a loss of power has killed the agent.
func (a *Agent) LostPower() bool { return a.power && a.dead.Load() }
