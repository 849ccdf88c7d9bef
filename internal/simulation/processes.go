package simulation

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/internal/reclaim"
	"chandler.dev/internal/simulation/kubelet"
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

// drawReclaim draws the reclaim rules. Only devices of machines made for simulations can be reset.
func (w *World) drawReclaim() (all []discovery.Selection[reclaim.Rule]) {
	before := w.handsOver
	w.handsOver = w.random.IntN(3) == 0
	if !w.handsOver || !before {
		w.markUnsure(learn)
	}
	if !w.handsOver {
		return nil
	}
	if w.machine.Resets && w.random.IntN(2) == 0 {
		w.mu.Lock()
		w.resets = true
		w.mu.Unlock()
		rule := discovery.Selection[reclaim.Rule]{Expression: "functions", Value: reclaim.Rule{Reset: true}, Selects: func(d discovery.Device) (bool, error) {
			return d.Attributes.String("kind") != "nic" && d.Attributes.String("function") != "virtual", nil // their functions have no way to be reset
		}}
		if w.random.IntN(2) == 0 {
			rule.Value.Methods = []string{"flr"}
		}
		all = append(all, rule)
	}
	return append(all, discovery.Selection[reclaim.Rule]{Expression: "true", Selects: func(discovery.Device) (bool, error) { return true, nil }})
}

// learn is the maximum time until all agents use new reclaim rules.
const learn = 2 * time.Minute

// markUnsure records that for a while some agents may not use the reclaim rules.
func (w *World) markUnsure(d time.Duration) {
	w.handsSince = time.Now().Add(d)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.processes {
		p.known = false
		p.unheld = p.unheld || p.ended
	}
}

// isReset reports whether the administrator has ever enabled resets of functions.
func (w *World) isReset() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.resets
}

// startProcess starts the process of a container, which opens all its nodes.
func (w *World) startProcess(c *kubelet.Container, uses []*use, nodes []string) {
	pod := w.cluster.PodOf(c.Pod.UID)
	known := w.handsOver && time.Now().After(w.handsSince) && (pod == nil || pod.Own) && !slices.ContainsFunc(uses, func(u *use) bool { return u.part != nil || u.open })
	pid := w.host.StartProcess("train", "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"+strings.ReplaceAll(string(c.Pod.UID), "-", "_")+".slice/cri-containerd-0.scope", nodes...)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.processes = append(w.processes, &running{pid: pid, pod: c.Pod.UID, uses: uses, known: known, since: time.Now()})
}

// endProcess ends a container's process, now or later: the process may hang in its driver.
func (w *World) endProcess(c *kubelet.Container) {
	late, lasts := w.chance.OneIn(6), w.chance.UpTo
	if pod := w.cluster.PodOf(c.Pod.UID); pod != nil && pod.Lingers > 0 {
		late, lasts = true, func(time.Duration) time.Duration { return pod.Lingers }
	}
	unheld := !w.handsOver || time.Now().Before(w.handsSince)
	for _, p := range w.ofPod(c.Pod.UID) {
		if p.ended {
			continue
		}
		w.mu.Lock()
		p.ended, p.brief, p.unheld = true, time.Since(p.since) < time.Minute || c.Pod.Init, unheld
		w.mu.Unlock()
		if !late {
			w.exit(p)
			continue
		}
		p.until = time.Now().Add(lasts(time.Minute))
		w.history.CountFault("processLingers")
		w.history.Log("a process of pod %s lives on when its container has ended", c.Pod)
	}
}

func (w *World) ofPod(uid types.UID) (found []*running) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.processes {
		if p.pod == uid {
			found = append(found, p)
		}
	}
	return found
}

func (w *World) exit(p *running) {
	w.host.Exit(p.pid)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.processes = slices.DeleteFunc(w.processes, func(other *running) bool { return other == p })
}

// reapProcesses ends processes that have hung for long enough.
func (w *World) reapProcesses(now time.Time) {
	w.mu.Lock()
	all := slices.Clone(w.processes)
	w.mu.Unlock()
	for _, p := range all {
		if p.ended && !now.Before(p.until) {
			w.history.Log("process %d ends", p.pid)
			w.exit(p)
		}
	}
}

// checkHandover returns the process of an earlier pod that still has a container's new device open,
// "" if there is none.
func (w *World) checkHandover(c *kubelet.Container, u *use) string {
	handsOver := w.handsOver && !w.failedOnce()
	if w.wiped || u.open || u.part != nil || !u.vfio && !handsOver {
		return ""
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.processes {
		for _, had := range p.uses {
			same := had.device == u.device && slices.ContainsFunc(had.nodes, func(n string) bool { return slices.Contains(u.nodes, n) })
			listed := !had.classic || p.ended && !p.brief && !p.unheld   // Allocate does not name the pod
			sees := p.known && listed && handsOver || u.vfio && had.vfio // VFIO lets only one process open the device
			if sees && p.pod != c.Pod.UID && same && (had.classic || had.claim != u.claim) {
				return fmt.Sprintf("process %d of pod %s has it open since before", p.pid, p.pod)
			}
		}
	}
	return ""
}

// openProcess returns the process of a container that has a function open, "" if there is none. It
// includes the processes of pods that the agent has no record of: an agent looks for them before each
// reset. It omits containers that got their device from another plugin.
func (w *World) openProcess(address string) string {
	if w.wiped {
		return ""
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.processes {
		for _, u := range p.uses {
			if !u.open && !u.stranger && u.address == address {
				return fmt.Sprintf("process %d of pod %s has it open", p.pid, p.pod)
			}
		}
	}
	return ""
}

// pathsOf returns the host paths of device nodes.
func pathsOf(edits specs.ContainerEdits) (paths []string) {
	for _, n := range edits.DeviceNodes {
		paths = append(paths, cmp.Or(n.HostPath, n.Path))
	}
	return paths
}
