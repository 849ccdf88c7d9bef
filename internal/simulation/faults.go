package simulation

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/apiserver"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/cluster"
	"chandler.dev/internal/simulation/disk"
)

// fault is a kind of fault.
type fault struct {
	name   string
	weight int
	strike func(w *World) bool // false if the fault is impossible now
}

// often is the kind of fault that strikes ten times as often, "" for none. It serves situations
// that arise only after a rare fault.
var often string

// faultKinds returns all kinds of faults, always in the same order.
func faultKinds() []fault {
	kinds := allFaults()
	for i := range kinds {
		if kinds[i].name == often {
			kinds[i].weight = 10 * max(kinds[i].weight, 1)
		}
	}
	return kinds
}

func allFaults() []fault {
	return []fault{
		{"agentKilled", 6, (*World).killAgent},
		{"agentKilledWriting", 10, func(w *World) bool { return w.killWriting(false) }},
		{"agentRestarted", 4, (*World).restartAgent},
		{"surge", 5, (*World).surgeAgent},
		{"surgeWrong", 3, (*World).surgeWrong},
		{"configChanged", 4, (*World).changeConfig},
		{"configWrong", 1, (*World).wrongConfig},
		{"configChangedAtStart", 3, (*World).restartChanged},
		{"stateWiped", 1, (*World).wipeState},
		{"reboot", 3, func(w *World) bool { return w.reboot(false) }},
		{"powerLost", 6, func(w *World) bool { return w.reboot(true) }},
		{"powerLostWriting", 8, func(w *World) bool { return w.killWriting(true) }},
		{"kubeletRestarted", 5, (*World).restartKubelet},
		{"kubeletDown", 2, (*World).stopKubelet},
		{"draCheckpointLost", 2, func(w *World) bool { return w.loseCheckpoints(true, false) }},
		{"classicCheckpointLost", 2, func(w *World) bool { return w.loseCheckpoints(false, true) }},
		{"forceDelete", 8, (*World).forceDelete},
		{"claimReallocated", 6, (*World).reallocate},
		{"deletedWhilePrepared", 4, (*World).deletePrepared},
		{"joinedWhileEnding", 4, (*World).joinEnding},
		{"podUnseen", 0, (*World).podUnseen},       // with -often alone
		{"kubeletAlone", 0, (*World).kubeletAlone}, // with -often alone
		{"apiDown", 3, (*World).apiDown},
		{"apiSlow", 2, (*World).apiSlow},
		{"apiThrottles", 3, (*World).apiThrottles},
		{"apiConflicts", 3, (*World).apiConflicts},
		{"apiForbids", 2, (*World).apiForbids},
		{"watchesEnd", 2, func(w *World) bool { w.server.EndWatches(); w.history.CountFault("watchesEnd"); return true }},
		{"listsStale", 3, (*World).listsStale},
		{"schedulerBehind", 3, (*World).schedulerBehind},
		{"schedulerRestarted", 2, (*World).restartScheduler},
		{"fieldsDropped", 2, (*World).dropFields},
		{"nodeDeleted", 1, (*World).deleteNode},
		{"slicesDeleted", 2, (*World).deleteSlices},
		{"diskSlow", 6, (*World).slowDisk},
		{"diskFull", 6, func(w *World) bool { return w.diskFails("diskFull", syscall.ENOSPC, 2, isWrite) }},
		{"readsFail", 3, func(w *World) bool { return w.diskFails("readsFail", syscall.EIO, 3, isRead) }},
		{"writesFail", 5, func(w *World) bool { return w.diskFails("writesFail", syscall.EIO, 3, isWrite) }},
		{"syncsFail", 5, func(w *World) bool { return w.diskFails("syncsFail", syscall.EIO, 2, isSync) }},
		{"readOnly", 3, func(w *World) bool { return w.diskFails("readOnly", syscall.EROFS, 1, disk.Op.ChangesDisk) }},
		{"specsWiped", 2, (*World).wipeSpecs},
		{"recordDamaged", 2, (*World).damageRecord},
		{"deviceVanishes", 4, (*World).vanishCard},
		{"deviceReturns", 4, (*World).comeBack},
		{"deviceSwapped", 2, (*World).swap},
		{"nodesRenumbered", 3, (*World).renumberCards},
		{"groupChanges", 1, (*World).moveGroup},
		{"numbersReassigned", 4, (*World).reassignCards},
		{"anotherPlugin", 0, nil}, // strikes before the start
		{"unreadable", 3, (*World).sickenCard},
		{"readHangs", 2, (*World).hangCard},
		{"processLingers", 0, nil}, // strikes when containers end
		{"agentKilledChanging", 6, (*World).killChanging},
		{"hostUses", 4, (*World).hostUses},
		{"driverRefuses", 3, (*World).driverRefuses},
		{"writesHang", 2, (*World).writesHang},
		{"supervisorKilled", 3, (*World).killSupervisor},
		{"daemonDies", 4, (*World).killDaemon},
		{"modesRefused", 2, (*World).modesRefused},
	}
}

func isWrite(op disk.Op) bool { return op == disk.Create || op == disk.Write || op == disk.MakeDir }
func isRead(op disk.Op) bool  { return op == disk.Read || op == disk.List }
func isSync(op disk.Op) bool  { return op == disk.Sync || op == disk.SyncDir }

// startFault makes a fault last for a random time up to longest, and then calls end.
func (w *World) startFault(name string, longest time.Duration, end func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ongoing[name] = &ongoing{time.Now().Add(time.Duration(w.random.Int64N(int64(longest)))), end}
}

func (w *World) goesOn(name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ongoing[name] != nil
}

// clean drops agents that have ended from w.living.
func (w *World) clean() {
	w.living = slices.DeleteFunc(w.living, func(i *agents.Agent) bool { return i.IsDead() })
}

// keepAgent starts an agent if none lives, as the kubelet does for a pod. If an agent was killed by
// a loss of power, the machine reboots.
func (w *World) keepAgent() {
	if slices.ContainsFunc(w.living, func(i *agents.Agent) bool { return i.LostPower() }) {
		w.reboot(true)
	}
	w.clean()
	if len(w.living) == 0 {
		w.startAgent()
	}
}

func (w *World) killAgent() bool {
	w.clean()
	if len(w.living) == 0 {
		return false
	}
	one := chance.PickOne(w.random, w.living...)
	w.history.Log("%s is killed", one.Name)
	one.Kill()
	w.history.CountFault("agentKilled")
	return true
}

// killWriting lets an agent be killed before a change of the disk, alone or by a loss of power.
func (w *World) killWriting(power bool) bool {
	w.clean()
	if len(w.living) == 0 {
		return false
	}
	one := chance.PickOne(w.random, w.living...)
	after := int64(2 + w.random.IntN(12))
	w.history.Log("%s is to be killed at its change %d of the disk, power lost %v", one.Name, after-1, power)
	one.KillWriting(after-1, power)
	return true
}

func (w *World) restartAgent() bool {
	w.clean()
	if len(w.living) != 1 {
		return false
	}
	w.replaceAgent(0)
	w.history.CountFault("agentRestarted")
	return true
}

// replaceAgent ends the agent and starts another. Without surges, the new agent starts after the
// first has ended, at most pause later. Meanwhile the scheduler allocates devices that the first
// agent published.
func (w *World) replaceAgent(pause time.Duration) {
	one := w.living[0]
	w.history.Log("%s is told to end", one.Name)
	one.Stop()
	w.living = nil
	if !w.surges {
		one.Wait()
		if pause > 0 {
			time.Sleep(time.Duration(w.random.Int64N(int64(pause))))
			w.tendCluster()
		}
	}
	w.startAgent()
}

// volatile lists the directories that a reboot empties.
var volatile = []string{"/var/run", "/run"}

func (w *World) reboot(powerLost bool) bool {
	w.history.Log("the machine reboots, power lost %v", powerLost)
	for _, i := range w.agents.All() { // also agents that were told to end and have not ended yet
		i.Kill()
	}
	w.living = nil
	w.kubelet.StopKubelet()
	w.kubelet.Reboot()
	if powerLost {
		if w.disk.LosePower(w.random, volatile...) {
			w.history.CountFault("powerLost")
		}
	} else {
		w.disk.Reboot(volatile...)
		w.history.CountFault("reboot")
	}
	w.newBoot()
	w.rebootHost()
	w.endOngoing("kubeletDown", "surge", wrongSurge)
	w.kubelet.StartKubelet()
	w.startAgent()
	return true
}

// endOngoing ends faults early, without calling their end functions.
func (w *World) endOngoing(names ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.ongoing, func(name string, _ *ongoing) bool { return slices.Contains(names, name) })
}

func (w *World) restartKubelet() bool {
	if !w.kubelet.IsUp() {
		return false
	}
	w.kubelet.StopKubelet()
	time.Sleep(time.Duration(w.random.IntN(2000)) * time.Millisecond)
	w.kubelet.StartKubelet()
	w.history.CountFault("kubeletRestarted")
	return true
}

// kubeletAlone restarts the kubelet while the API server is down. Until the API server answers, the
// kubelet lists only static pods.
func (w *World) kubeletAlone() bool {
	if !w.kubelet.IsUp() || !w.apiDown() {
		return false
	}
	w.history.CountFault("kubeletAlone")
	return w.restartKubelet()
}

func (w *World) stopKubelet() bool {
	if !w.kubelet.IsUp() {
		return false
	}
	w.kubelet.StopKubelet()
	w.startFault("kubeletDown", time.Minute, w.kubelet.StartKubelet)
	w.history.CountFault("kubeletDown")
	return true
}

func (w *World) loseCheckpoints(dra, classic bool) bool {
	if !w.kubelet.IsUp() {
		return false
	}
	w.kubelet.StopKubelet()
	w.history.Log("the kubelet loses its checkpoints, DRA %v, device plugin API %v", dra, classic)
	w.kubelet.LoseCheckpoints(dra, classic)
	if w.damage.HasLostRecords() && !w.agents.Lock.HasListing() {
		w.usage.ForgetUses() // neither the kubelet nor the active agent has a record of them
	}
	w.kubelet.StartKubelet()
	if dra {
		w.history.CountFault("draCheckpointLost")
	} else {
		w.history.CountFault("classicCheckpointLost")
	}
	return true
}

func (w *World) forceDelete() bool {
	if w.isDown() {
		return false
	}
	if p := w.cluster.PickPod(func(p *cluster.Pod) bool { return p.Bound }); p != nil {
		w.cluster.DeletePod(p, true)
		w.history.CountFault("forceDelete")
		return true
	}
	return false
}

// reallocate allocates a claim again while a container keeps running with the claim's earlier
// devices: the pod is deleted by force, another claim has the device for a moment, and a restarted
// kubelet prepares the claim again.
func (w *World) reallocate() bool {
	p := w.cluster.PickPod(func(p *cluster.Pod) bool { return p.Bound && !p.Own && p.Stubborn })
	if p == nil || w.isDown() || !w.kubelet.IsUp() {
		return false
	}
	w.makeRoom()
	before := w.server.Claim(cluster.Namespace, p.Claims[0]).DeepCopy()
	w.cluster.DeletePod(p, true)
	if before.Status.Allocation == nil || w.server.Claim(cluster.Namespace, before.Name).Status.Allocation != nil {
		return true // the pod has ended, or other pods have the claim too
	}
	passing, next := before.DeepCopy(), w.cluster.NewPod("pod")
	passing.Name, passing.UID = "passing", ""
	next.Own, next.Claims = false, p.Claims
	w.server.Put(passing)
	placed := w.cluster.SchedulePod(next)
	w.server.Delete(passing)
	w.kubelet.StopKubelet()
	w.kubelet.StartKubelet()
	time.Sleep(time.Duration(w.random.IntN(500)) * time.Millisecond) // the kubelet ends containers of unknown pods within a second
	w.cluster.SubmitPod(next)
	if placed {
		w.history.CountFault("claimReallocated")
	}
	return true
}

// deletePrepared deletes a pod by force while a slow disk delays its claim, and starts another pod
// that may get the device.
func (w *World) deletePrepared() bool {
	if w.isDown() || w.goesOn(diskFault) || !w.offersDRA() {
		return false
	}
	w.disk.SetFault(func(op disk.Op, file string) error {
		if op == disk.Write && strings.HasPrefix(file, agents.StateDir+"/claims/") {
			time.Sleep(w.chance.UpTo(3 * time.Second))
		}
		return nil
	})
	w.startFault(diskFault, 5*time.Second, func() { w.disk.SetFault(nil) })
	one, other := w.cluster.NewPod("pod"), w.cluster.NewPod("pod")
	for _, p := range []*cluster.Pod{one, other} {
		p.Claims = []string{p.Name + "-claim-0"}
		w.makeClaim(p.Claims[0])
	}
	w.cluster.SubmitPod(one)
	time.Sleep(w.chance.UpTo(200 * time.Millisecond))
	w.cluster.DeletePod(one, true)
	w.cluster.SubmitPod(other)
	if one.Bound && other.Bound {
		w.history.CountFault("deletedWhilePrepared")
	}
	return true
}

// joinEnding lets a pod join a claim whose Unprepare fails at least twice, because the disk fails
// all removals for a while. Kubelets up to 1.36 start the pod without another call, since the claim
// counts as prepared (see [kubelet.Container]).
func (w *World) joinEnding() bool {
	if w.isDown() || w.goesOn(diskFault) || !w.offersDRA() || !w.kubelet.IsUp() {
		return false
	}
	name := fmt.Sprintf("joined-%d", w.cluster.PodCount())
	w.makeClaim(name)
	one, other := w.cluster.NewPod("pod"), w.cluster.NewPod("pod")
	for _, p := range []*cluster.Pod{one, other} {
		p.Own, p.Claims = false, []string{name}
	}
	one.Stubborn = false
	other.Life, other.Restarts = time.Duration(30+w.random.IntN(60))*time.Second, 3
	w.cluster.SubmitPod(one)
	time.Sleep(2 * time.Second)
	w.disk.SetFault(func(op disk.Op, _ string) error {
		if op != disk.Remove {
			return nil
		}
		return syscall.EIO
	})
	w.startFault(diskFault, 20*time.Second, func() {
		w.disk.SetFault(nil)
		w.damage.StartHealing()
	})
	w.cluster.DeletePod(one, !one.Bound)
	time.Sleep(2 * time.Second) // the kubelet calls Unprepare, and again a second later
	w.cluster.SubmitPod(other)
	if one.Bound && other.Bound {
		w.history.CountFault("joinedWhileEnding")
	}
	return true
}

// podUnseen lets a pod of a PodGroup run while no agent can ask the API server for the UID of the
// pod, so that its processes are unknown. One of them outlives the container by a minute.
func (w *World) podUnseen() bool {
	if w.minor < 37 || w.isDown() || !w.offersDRA() || !w.kubelet.IsUp() || !w.usage.Processes.Reclaims() || !w.isReset() {
		return false
	}
	w.makeRoom()
	p := w.cluster.NewPod("pod")
	p.Own, p.Claims, p.Group = false, []string{p.Name + "-claim"}, p.Name+"-group"
	p.Stubborn, p.Life, p.Lingers = false, 5*time.Second, time.Minute
	w.server.Put(cluster.NewClaim(p.Claims[0], 1))
	w.cluster.SubmitPod(p)
	time.Sleep(w.chance.UpTo(2 * time.Second))
	if p.Bound && w.apiDown() {
		time.Sleep(p.Life + p.Lingers) // until an agent would reset the device
		w.history.CountFault("podUnseen")
	}
	return true
}

// makeRoom ends a pod that alone has its claims.
func (w *World) makeRoom() {
	if room := w.cluster.PickPod(func(room *cluster.Pod) bool { return room.Bound && room.Own && len(room.Claims) > 0 }); room != nil {
		w.cluster.DeletePod(room, false)
		time.Sleep(room.Grace + time.Second)
		w.cluster.ForgetEnded()
	}
}

// setFault makes the API server answer calls of the agent with a fault.
func (w *World) setFault(name string, longest time.Duration, f apiserver.Fault) bool {
	if slices.ContainsFunc([]string{"apiDown", "apiSlow", "apiThrottles", "apiConflicts", "apiForbids"}, w.goesOn) {
		return false
	}
	w.server.SetFault(f)
	w.startFault(name, longest, func() { w.server.SetFault(nil) })
	return true
}

func (w *World) apiDown() bool {
	done := w.setFault("apiDown", 90*time.Second, func(context.Context, apiserver.Call) error {
		w.history.CountFault("apiDown")
		return apiserver.ErrDown
	})
	if done {
		w.server.EndWatches()
	}
	return done
}

func (w *World) apiSlow() bool {
	return w.setFault("apiSlow", 30*time.Second, func(ctx context.Context, _ apiserver.Call) error {
		w.history.CountFault("apiSlow")
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(w.chance.UpTo(8 * time.Second)):
			return nil
		}
	})
}

func (w *World) apiThrottles() bool {
	return w.setFault("apiThrottles", 30*time.Second, func(_ context.Context, call apiserver.Call) error {
		if !w.chance.OneIn(2) {
			return nil
		}
		w.history.CountFault("apiThrottles")
		if w.chance.OneIn(4) {
			return apiserver.InternalError()
		}
		return apiserver.TooMany()
	})
}

func (w *World) apiConflicts() bool {
	return w.setFault("apiConflicts", 30*time.Second, func(_ context.Context, call apiserver.Call) error {
		if call.Verb != "update" && call.Verb != "apply" && call.Verb != "delete" || !w.chance.OneIn(2) {
			return nil
		}
		w.history.CountFault("apiConflicts")
		return apierrors.NewConflict(schema.GroupResource{Resource: call.Resource}, "", nil)
	})
}

func (w *World) apiForbids() bool {
	return w.setFault("apiForbids", 40*time.Second, func(_ context.Context, call apiserver.Call) error {
		if call.Resource == "nodes" || call.Resource == "pods" {
			return nil
		}
		w.history.CountFault("apiForbids")
		return apiserver.ForbiddenError(call.Resource)
	})
}

func (w *World) listsStale() bool {
	if w.goesOn("listsStale") {
		return false
	}
	w.server.FreezeLists()
	w.startFault("listsStale", 40*time.Second, w.server.ThawLists)
	w.history.CountFault("listsStale")
	return true
}

func (w *World) schedulerBehind() bool {
	if w.goesOn("schedulerBehind") {
		return false
	}
	w.cluster.Lag = int64(1 + w.random.IntN(30))
	w.startFault("schedulerBehind", 30*time.Second, func() { w.cluster.Lag = 0 })
	w.history.CountFault("schedulerBehind")
	return true
}

// dropFields gives the API server the features of another version.
func (w *World) dropFields() bool {
	minor := chance.PickOne(w.random, 34, 35, 36, 37)
	w.history.Log("the API server keeps the fields of Kubernetes 1.%d", minor)
	w.setFeatures(featuresOf(minor))
	w.history.CountFault("fieldsDropped")
	return true
}

// setFeatures sets the API server's features, and notes the time of a change.
func (w *World) setFeatures(f apiserver.Features) {
	if f != w.server.Features() {
		w.featuresChanged = time.Now()
	}
	w.server.SetFeatures(f)
}

func (w *World) deleteNode() bool {
	if w.isDown() {
		return false
	}
	w.history.Log("the node is deleted and made anew")
	w.server.Delete(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}})
	w.server.Put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}})
	w.history.CountFault("nodeDeleted")
	return true
}

func (w *World) deleteSlices() bool {
	if w.server.DeleteSlices(nodeName) == 0 {
		return false
	}
	w.history.Log("all slices of the node are deleted")
	w.history.CountFault("slicesDeleted")
	return true
}
