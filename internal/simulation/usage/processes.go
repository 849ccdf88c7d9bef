package usage

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/simulation/kernel"
	"chandler.dev/internal/simulation/kubelet"
	"chandler.dev/internal/simulation/machine"
)

// running is the process of a container.
type running struct {
	pid   int
	pod   types.UID
	uses  []*use
	known bool // all its devices are subject to reclaim, and the consumer is known
	since time.Time
	until time.Time
	ended bool // its container has ended

	// brief is set if not every agent can have read the devices' consumer from PodResources: the
	// container ended too early, or is an init container, which PodResources leaves out.
	brief bool

	// unheld is set if agents may have had no reclaim rule at some time since the end of the
	// container. Such agents release the device at once, and no record contains the pod any more.
	unheld bool
}

// Processes are the processes of containers, which keep devices open, and the reclaim rules that apply to
// them. Any goroutine may call its methods.
type Processes struct {
	Config

	mu       sync.Mutex
	all      []*running
	reclaims bool      // the administrator enables reclaim
	settled  time.Time // the time when all agents use the reclaim rules
}

// LearnTime is the maximum time until all agents use new reclaim rules.
const LearnTime = 2 * time.Minute

// SetReclaim records that the administrator enables or disables reclaim.
func (a *Processes) SetReclaim(enabled bool) {
	a.mu.Lock()
	before := a.reclaims
	a.reclaims = enabled
	a.mu.Unlock()
	if !enabled || !before {
		a.MarkUnsure(LearnTime)
	}
}

// Reclaims reports whether the administrator enables reclaim.
func (a *Processes) Reclaims() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.reclaims
}

// isSettled reports whether the administrator enables reclaim, and all agents use the rules.
func (a *Processes) isSettled() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.reclaims && time.Now().After(a.settled)
}

// MarkUnsure records that for a while some agents may not use the reclaim rules.
func (a *Processes) MarkUnsure(d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.settled = time.Now().Add(d)
	for _, p := range a.all {
		p.known = false
		p.unheld = p.unheld || p.ended
	}
}

// start starts the process of a container, which opens all its nodes. If another card under its own
// driver has replaced a function under vfio since the claim was prepared, the node of the function is
// gone, and the process cannot open the card.
func (a *Processes) start(c *kubelet.Container, uses []*use, nodes []string) {
	uses = slices.DeleteFunc(slices.Clone(uses), func(u *use) bool {
		driver, _ := a.Host.Driver(u.address)
		return u.vfio && driver != "" && driver != kernel.VFIO
	})
	pod := a.Cluster.PodOf(c.Pod.UID)
	known := a.isSettled() && (pod == nil || pod.Own) && !slices.ContainsFunc(uses, func(u *use) bool { return u.part != nil || u.open })
	pid := a.Host.StartProcess("train", "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"+strings.ReplaceAll(string(c.Pod.UID), "-", "_")+".slice/cri-containerd-0.scope", nodes...)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = append(a.all, &running{pid: pid, pod: c.Pod.UID, uses: uses, known: known, since: time.Now()})
}

// EndContainer ends the process of a container that has ended, now or later: the process may hang in its driver.
func (a *Processes) EndContainer(c *kubelet.Container) {
	late, lasts := a.Chance.OneIn(6), a.Chance.UpTo
	if pod := a.Cluster.PodOf(c.Pod.UID); pod != nil && pod.Lingers > 0 {
		late, lasts = true, func(time.Duration) time.Duration { return pod.Lingers }
	}
	unheld := !a.isSettled()
	for _, p := range a.ofPod(c.Pod.UID) {
		if p.ended {
			continue
		}
		a.mu.Lock()
		p.ended, p.brief, p.unheld = true, time.Since(p.since) < time.Minute || c.Pod.Init, unheld
		a.mu.Unlock()
		if !late {
			a.exit(p)
			continue
		}
		p.until = time.Now().Add(lasts(time.Minute))
		a.History.CountFault("processLingers")
		a.History.Log("a process of pod %s lives on when its container has ended", c.Pod)
	}
}

// ofPod returns the processes of a pod.
func (a *Processes) ofPod(uid types.UID) (found []*running) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.all {
		if p.pod == uid {
			found = append(found, p)
		}
	}
	return found
}

// DeviceOf returns the address of a device of a claim that a pod's process has open, "" if there is
// none. The agents know the pod, and reclaim the device.
func (a *Processes) DeviceOf(pod types.UID) string {
	for _, p := range a.ofPod(pod) {
		for _, u := range p.uses {
			if p.known && !u.classic && len(u.nodes) > 0 && u.address != "" {
				return u.address
			}
		}
	}
	return ""
}

// exit ends a process.
func (a *Processes) exit(p *running) {
	a.Host.Exit(p.pid)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = slices.DeleteFunc(a.all, func(other *running) bool { return other == p })
}

// EndLingering ends processes that have hung for long enough.
func (a *Processes) EndLingering(now time.Time) {
	a.mu.Lock()
	all := slices.Clone(a.all)
	a.mu.Unlock()
	for _, p := range all {
		if p.ended && !now.Before(p.until) {
			a.History.Log("process %d ends", p.pid)
			a.exit(p)
		}
	}
}

// checkReclaim returns the process of an earlier pod that still has a container's new device open,
// "" if there is none.
func (a *Processes) checkReclaim(c *kubelet.Container, u *use) string {
	reclaims := a.Reclaims() && !a.Damage.HasFailedDisk()
	if a.Damage.HasLostRecords() || u.open || u.part != nil || !u.vfio && !reclaims {
		return ""
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.all {
		for _, had := range p.uses {
			same := had.device == u.device && slices.ContainsFunc(had.nodes, func(n string) bool { return slices.Contains(u.nodes, n) })
			listed := !had.classic || p.ended && !p.brief && !p.unheld  // Allocate does not name the pod
			sees := p.known && listed && reclaims || u.vfio && had.vfio // VFIO lets only one process open the device
			if sees && p.pod != c.Pod.UID && same && (had.classic || had.claim != u.claim) {
				return fmt.Sprintf("process %d of pod %s has it open since before", p.pid, p.pod)
			}
		}
	}
	return ""
}

// withOpen returns the process of a container that has a function open, "" if there is none. It
// includes the processes of pods that the agent has no record of: an agent looks for them before each
// reset. It omits containers that got their device from another plugin.
func (a *Processes) withOpen(address string) string {
	if a.Damage.HasLostRecords() {
		return ""
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.all {
		for _, u := range p.uses {
			if !u.open && !u.stranger && u.address == address {
				return fmt.Sprintf("process %d of pod %s has it open", p.pid, p.pod)
			}
		}
	}
	return ""
}

// PullOut removes a returned card from the uses of processes that had the card open before: the
// kernel has invalidated their open files.
func (a *Processes) PullOut(c machine.Card) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.all {
		p.uses = slices.DeleteFunc(slices.Clone(p.uses), func(u *use) bool {
			return u.address == c.Address || strings.Contains(a.Machine.Devices[u.device].Source, c.Address) && !a.Machine.Reassigns
		})
	}
}

// RebootHost ends all processes.
func (a *Processes) RebootHost() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = nil
}
