package simulation

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"chandler.dev/cdi"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver"
	"chandler.dev/internal/simulation/apiserver"
	"chandler.dev/internal/simulation/disk"
	"chandler.dev/internal/simulation/kubelet"
)

// incarnation is one process of the agent.
type incarnation struct {
	world   *World
	name    string
	uid     types.UID
	boot    string
	cancel  context.CancelFunc
	process *kubelet.Process
	events  chan struct{} // events of the kernel
	changes chan agent.Change
	done    chan struct{} // closed when the agent has returned
	err     error         // the result of the agent; read after done

	dead      atomic.Bool
	wrong     atomic.Bool  // its configuration is invalid
	limit     atomic.Int64 // the number of further changes of the disk before the process is killed, plus one; 0 means never
	hostLimit atomic.Int64 // the same for changes of the host's attributes
	power     bool         // the kill is a loss of power
}

// errKilled is the result of calls by a killed process.
var errKilled = errors.New("the process was killed")

// diskGate lets the process change the disk while the process lives.
func (i *incarnation) diskGate(op disk.Op, name string) error {
	if i.dead.Load() {
		return disk.ErrDead
	}
	if op == disk.Remove && path.Ext(name) == ".record" {
		i.world.checkReallocated(name, i.boot)
	}
	if op == disk.Rename {
		i.world.noteRecord(name)
	}
	if (op.ChangesDisk() || op == disk.Sync || op == disk.SyncDir) && i.limit.Load() > 0 && i.limit.Add(-1) == 0 {
		i.world.log("%s is killed before it can %s", i.name, op)
		i.world.countFault(map[bool]string{false: "agentKilledWriting", true: "powerLostWriting"}[i.power])
		i.killAgent()
		return disk.ErrDead
	}
	return nil
}

// apiGate lets the process call the API server while the process lives.
func (i *incarnation) apiGate(_ context.Context, call apiserver.Call) error {
	if i.dead.Load() {
		return errKilled
	}
	if call.ListsCluster(nodeName) {
		i.world.fail("%s asks to %s with the selector %q, whose answer grows with the cluster", i.name, call, call.Selector)
	}
	return nil
}

// killAgent ends the process at once: nothing that the process does afterwards has an effect.
func (i *incarnation) killAgent() {
	if i.dead.Swap(true) {
		return
	}
	i.world.recordHurt()
	i.world.lock.releaseDead(i)
	i.cancel()
	i.process.Kill()
}

// lock is the node's lock, which one agent has at a time. If a process is killed during a write in
// the kernel, the process ends only after the write, and the kernel releases its locks then
// (do_exit in kernel/exit.c, Linux 6.1 to 6.18).
type lock struct {
	mu      sync.Mutex
	holder  *incarnation
	waiting map[*incarnation]bool
	writing map[*incarnation]int // writes to the host in progress
	since   time.Time            // the time when the holder got the lock
}

func (l *lock) isHeld() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holder != nil && !l.holder.dead.Load()
}

// heldSince returns the time since which an agent has had the lock, and the present time if no
// agent has the lock.
func (l *lock) heldSince() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holder == nil {
		return time.Now()
	}
	return l.since
}

// hasListing reports whether PodResources has listed the pods to the agent that has the lock.
func (l *lock) hasListing() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holder != nil && l.holder.process.HasListing()
}

func (l *lock) dropLock(i *incarnation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.release(i)
}

func (l *lock) release(i *incarnation) {
	delete(l.waiting, i)
	if l.holder == i {
		l.holder = nil
	}
}

// releaseDead releases the lock of an agent whose process ends, unless a write is in progress.
func (l *lock) releaseDead(i *incarnation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.waiting, i)
	if l.writing[i] == 0 {
		l.release(i)
	}
}

// beginWrite records the beginning of a write by an agent, and reports whether the agent has the
// lock.
func (l *lock) beginWrite(i *incarnation) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.writing[i]++
	return l.holder == i
}

// endWrite records the end of a write by an agent.
func (l *lock) endWrite(i *incarnation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.writing[i]--; l.writing[i] == 0 && i.dead.Load() {
		l.release(i)
	}
}

// isWriting reports whether a write of an agent is in progress.
func (l *lock) isWriting(i *incarnation) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.writing[i] > 0
}

// reboot removes all processes.
func (l *lock) reboot() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holder, l.waiting = nil, make(map[*incarnation]bool)
}

// lockPause is the interval between attempts to get the lock, as for the real lock.
const lockPause = 50 * time.Millisecond

// lockOf is the lock from the view of one agent.
type lockOf struct {
	*lock
	own *incarnation
}

// Acquire implements [agent.Lock].
func (l lockOf) Acquire(ctx context.Context) (func(), error) {
	for {
		l.mu.Lock()
		if l.holder == nil && !l.own.dead.Load() {
			l.holder, l.since = l.own, time.Now()
			delete(l.waiting, l.own)
			l.mu.Unlock()
			l.own.world.log("%s is the active agent", l.own.name)
			if l.own.world.wiped { // the wipe may have happened after the start of the agent
				l.own.world.forgetUses()
			}
			return l.unlock, nil
		}
		l.waiting[l.own] = true
		l.mu.Unlock()
		select {
		case <-ctx.Done():
			l.dropLock(l.own)
			return nil, ctx.Err()
		case <-time.After(lockPause):
		}
	}
}

// unlock releases the lock. The agent must not write to the host afterwards, since the next agent
// begins.
func (l lockOf) unlock() {
	if l.isWriting(l.own) {
		l.own.world.fail("%s releases the node's lock while a write of it goes on", l.own.name)
	}
	l.dropLock(l.own)
}

// Awaited implements [agent.Lock].
func (l lockOf) Awaited() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.waiting) > 0
}

// Paths of the node.
const (
	kubeletRoot = "/var/lib/kubelet"
	stateDir    = kubeletRoot + "/plugins/chandler.dev"
	runDir      = "/run/chandler"
	cdiRoot     = "/var/run/cdi"
)

// startAgent starts another agent on the node.
func (w *World) startAgent() *incarnation { return w.startAgentWith(w.settings, nil) }

// startAgentWith starts an agent with settings. wrong is the error if the configuration is invalid.
func (w *World) startAgentWith(settings agent.Settings, wrong error) *incarnation {
	w.agents++
	if w.wiped {
		w.forgetUses()
	}
	w.forgetNumbers()
	if w.hurt {
		w.startHealing()
	}
	i := &incarnation{world: w, name: fmt.Sprintf("agent-%d", w.agents), boot: w.boot, events: make(chan struct{}, 1), changes: make(chan agent.Change), done: make(chan struct{})}
	i.wrong.Store(wrong != nil)
	if w.surges {
		i.uid = types.UID(fmt.Sprintf("00000000-0000-4000-9000-%012d", w.agents))
	}
	i.process = w.kubelet.NewProcess(i.name)
	logger := logr.New(&sink{world: w, prefix: i.name + ": "})
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logger))
	i.cancel = cancel
	client := w.server.Client(i.apiGate)
	config := agent.Config{
		Version: "simulated", NodeName: nodeName, PodUID: i.uid, Pod: "kube-system/" + agentPod, BootID: w.boot,
		FS: w.host, Families: w.machine.families, Settings: settings, ConfigError: wrong, Changes: i.changes, RescanInterval: w.rescan,
		Uevents: i.forwardEvents, AllEvents: true, Client: client, StatusClient: client, ServedVersions: func(ctx context.Context) ([]string, error) { return w.server.ServedVersions(ctx, i.apiGate) },
		Kubelet: agent.Kubelet{StartDRA: func(ctx context.Context, plugin kubeletplugin.DRAPlugin, options ...kubeletplugin.Option) (driver.Helper, error) {
			helper, err := i.process.StartDRA(ctx, plugin, options...)
			if err != nil {
				return nil, err
			}
			return helper, nil
		}},
		Lock: lockOf{&w.lock, i}, KubeletRoot: kubeletRoot, StateDir: stateDir, RunDir: runDir,
		CDI:            cdi.Dir{Path: cdiRoot},
		NoMetadata:     !w.metadata,
		ReadParameters: readParameters,
		Write:          i.write,

		SharingPrograms: w.supervisor,
	}
	w.equipAgent(&config, i)
	w.living = append(w.living, i)
	w.mu.Lock()
	w.all = append(w.all, i)
	w.mu.Unlock()
	w.log("%s starts in boot %s", i.name, w.boot)
	go func() {
		defer close(i.done)
		i.err = agent.Run(ctx, config)
		i.world.log("%s has ended: %v", i.name, i.err)
		i.killAgent()
	}()
	return i
}

// forwardEvents forwards the kernel's events to the agent.
func (i *incarnation) forwardEvents(ctx context.Context, events chan scan.Changes) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-i.events:
			scan.Changes{Everything: true}.Send(events)
		}
	}
}

// sendUevent sends an event of the kernel to all living agents. Only the root goroutine may call
// uevent.
func (w *World) sendUevent() {
	for _, i := range w.living {
		select {
		case i.events <- struct{}{}:
		default:
		}
	}
}

// announceUevent sends an event of the kernel to all agents, from any goroutine.
func (w *World) announceUevent() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, i := range w.all {
		select {
		case i.events <- struct{}{}:
		default:
		}
	}
}

// sink writes log messages to the history.
type sink struct {
	world  *World
	prefix string
	values []any
	slices bool // the sink of the library's controller of slices
}

// rescheduled is the message of the library's controller after it has scheduled the next sync of a
// pool. While the clock stands at the moment of the sync, as the clock of a simulation does, the
// controller would repeat this at once without end (resourceslice/resourceslicecontroller.go,
// syncPool).
const rescheduled = "Scheduled re-sync"

func (s *sink) Init(logr.RuntimeInfo)  {}
func (s *sink) Enabled(level int) bool { return level <= 2 || s.slices }

func (s *sink) Info(level int, message string, values ...any) {
	if s.slices && message == rescheduled {
		time.Sleep(time.Microsecond)
	}
	if level > 2 {
		return
	}
	s.world.log("%s%s%s", s.prefix, message, formatPairs(append(s.values, values...)))
}

func (s *sink) Error(err error, message string, values ...any) {
	s.world.log("%s%s: %v%s", s.prefix, message, err, formatPairs(append(s.values, values...)))
}

func (s *sink) WithValues(values ...any) logr.LogSink {
	return &sink{s.world, s.prefix, append(append([]any{}, s.values...), values...), s.slices}
}

func (s *sink) WithName(name string) logr.LogSink {
	named := *s
	named.slices = s.slices || name == "ResourceSlice controller"
	return &named
}

func formatPairs(values []any) string {
	var b strings.Builder
	for i := 0; i+1 < len(values); i += 2 {
		fmt.Fprintf(&b, " %v=%v", values[i], values[i+1])
	}
	return b.String()
}
