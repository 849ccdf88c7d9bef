package simulation

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/internal/reclaim"
	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/apiserver"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/cluster"
	"chandler.dev/internal/simulation/disk"
	"chandler.dev/internal/simulation/usage"
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

// drawnFaults returns the names of the faults that -often accepts.
func drawnFaults() (names []string) {
	for _, f := range allFaults() {
		if f.strike != nil {
			names = append(names, f.name)
		}
	}
	return names
}

func allFaults() []fault {
	return []fault{
		{"agentKilled", 6, killAgent},
		{"agentKilledWriting", 10, func(w *World) bool { return killWriting(w, false) }},
		{"agentRestarted", 4, restartAgent},
		{"surge", 5, surgeAgent},
		{"surgeWrong", 3, surgeWrong},
		{"configChanged", 4, changeConfig},
		{"configWrong", 1, wrongConfig},
		{"configChangedAtStart", 3, restartChanged},
		{"stateWiped", 1, wipeState},
		{"reboot", 3, func(w *World) bool { return w.reboot(false) }},
		{"powerLost", 6, func(w *World) bool { return w.reboot(true) }},
		{"powerLostWriting", 8, func(w *World) bool { return killWriting(w, true) }},
		{"kubeletRestarted", 5, restartKubelet},
		{"kubeletDown", 2, stopKubelet},
		{"draCheckpointLost", 2, func(w *World) bool { return loseCheckpoints(w, true, false) }},
		{"classicCheckpointLost", 2, func(w *World) bool { return loseCheckpoints(w, false, true) }},
		{"forceDelete", 8, forceDelete},
		{"claimReallocated", 6, reallocateClaim},
		{"deletedWhilePrepared", 4, deletePrepared},
		{"joinedWhileEnding", 4, joinEnding},
		{"podUnseen", 0, podUnseen},       // with -often alone
		{"deviceKeptOpen", 0, keepOpen},   // with -often alone
		{"kubeletAlone", 0, kubeletAlone}, // with -often alone
		{"apiDown", 3, apiDown},
		{"apiSlow", 2, apiSlow},
		{"apiThrottles", 3, apiThrottles},
		{"apiConflicts", 3, apiConflicts},
		{"apiForbids", 2, apiForbids},
		{"watchesEnd", 2, func(w *World) bool { w.server.EndWatches(); w.history.CountFault("watchesEnd"); return true }},
		{"listsStale", 3, listsStale},
		{"schedulerBehind", 3, schedulerBehind},
		{"schedulerRestarted", 2, restartScheduler},
		{"fieldsDropped", 2, dropFields},
		{"nodeDeleted", 1, deleteNode},
		{"slicesDeleted", 2, deleteSlices},
		{"diskSlow", 6, slowDisk},
		{"diskFull", 6, func(w *World) bool { return diskFails(w, "diskFull", syscall.ENOSPC, 2, isWrite) }},
		{"readsFail", 3, func(w *World) bool { return diskFails(w, "readsFail", syscall.EIO, 3, isRead) }},
		{"writesFail", 5, func(w *World) bool { return diskFails(w, "writesFail", syscall.EIO, 3, isWrite) }},
		{"syncsFail", 5, func(w *World) bool { return diskFails(w, "syncsFail", syscall.EIO, 2, isSync) }},
		{"readOnly", 3, func(w *World) bool { return diskFails(w, "readOnly", syscall.EROFS, 1, disk.Op.ChangesDisk) }},
		{"specsWiped", 2, wipeSpecs},
		{"recordDamaged", 2, damageRecord},
		{"deviceVanishes", 4, vanishCard},
		{"deviceReturns", 4, returnCard},
		{"deviceSwapped", 2, swapCard},
		{"nodesRenumbered", 3, renumberCards},
		{"groupChanges", 1, moveGroup},
		{"numbersReassigned", 4, reassignCards},
		{"anotherPlugin", 0, nil}, // strikes before the start
		{"unreadable", 3, sickenCard},
		{"readHangs", 2, hangCard},
		{"processLingers", 0, nil}, // strikes when containers end
		{"agentKilledChanging", 6, killChanging},
		{"hostUses", 4, hostUses},
		{"driverRefuses", 3, driverRefuses},
		{"writesHang", 2, writesHang},
		{"supervisorKilled", 3, killSupervisor},
		{"daemonDies", 4, killDaemon},
		{"modesRefused", 2, modesRefused},
	}
}

func isWrite(op disk.Op) bool { return op == disk.Create || op == disk.Write || op == disk.MakeDir }
func isRead(op disk.Op) bool  { return op == disk.Read || op == disk.List }
func isSync(op disk.Op) bool  { return op == disk.Sync || op == disk.SyncDir }

// keepAgent starts an agent if none lives, as the kubelet does for a pod. If an agent was killed by
// a loss of power, the machine reboots.
func (w *World) keepAgent() {
	if slices.ContainsFunc(w.agents.LivingAgents(), (*agents.Agent).LostPower) {
		w.reboot(true)
	}
	w.agents.DropDead()
	if len(w.agents.LivingAgents()) == 0 {
		w.startAgent()
	}
}

func killAgent(w *World) bool {
	w.agents.DropDead()
	if len(w.agents.LivingAgents()) == 0 {
		return false
	}
	one := chance.PickOne(w.random, w.agents.LivingAgents()...)
	w.history.Log("%s is killed", one.Name)
	one.Kill()
	w.history.CountFault("agentKilled")
	return true
}

// killWriting lets an agent be killed before a change of the disk, alone or by a loss of power.
func killWriting(w *World, power bool) bool {
	w.agents.DropDead()
	if len(w.agents.LivingAgents()) == 0 {
		return false
	}
	one := chance.PickOne(w.random, w.agents.LivingAgents()...)
	after := int64(2 + w.random.IntN(12))
	w.history.Log("%s is to be killed at its change %d of the disk, power lost %v", one.Name, after-1, power)
	one.KillWriting(after-1, power)
	return true
}

func restartAgent(w *World) bool {
	w.agents.DropDead()
	if len(w.agents.LivingAgents()) != 1 {
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
	one := w.agents.LivingAgents()[0]
	w.history.Log("%s is told to end", one.Name)
	w.agents.End(one)
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
	w.agents.KillAll()
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
	w.rebootHost()
	w.lasting.dropFaults("kubeletDown", "surge", wrongSurge)
	w.kubelet.StartKubelet()
	w.startAgent()
	return true
}

func restartKubelet(w *World) bool {
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
func kubeletAlone(w *World) bool {
	if !w.kubelet.IsUp() || !apiDown(w) {
		return false
	}
	w.history.CountFault("kubeletAlone")
	return restartKubelet(w)
}

func stopKubelet(w *World) bool {
	if !w.kubelet.IsUp() {
		return false
	}
	w.kubelet.StopKubelet()
	w.lasting.startFault("kubeletDown", time.Minute, w.kubelet.StartKubelet)
	w.history.CountFault("kubeletDown")
	return true
}

func loseCheckpoints(w *World, dra, classic bool) bool {
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

func forceDelete(w *World) bool {
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

// reallocateClaim allocates a claim again while a container keeps running with the claim's earlier
// devices: the pod is deleted by force, another claim has the device for a moment, and a restarted
// kubelet prepares the claim again. A kubelet up to 1.36 may be restarted only after another pod of
// the claim has started with the earlier devices.
func reallocateClaim(w *World) bool {
	p := w.cluster.PickPod(func(p *cluster.Pod) bool { return p.Bound && !p.Own && p.Stubborn })
	if p == nil || w.isDown() || !w.kubelet.IsUp() {
		return false
	}
	makeRoom(w)
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
	if w.minor < 37 && w.random.IntN(2) == 0 {
		next.Stubborn, next.Grace = true, time.Minute
		w.cluster.SubmitPod(next)
		time.Sleep(time.Second)
		next = w.cluster.NewPod("pod")
		next.Own, next.Claims = false, p.Claims
	}
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
func deletePrepared(w *World) bool {
	if w.isDown() || w.lasting.goesOn(diskFault) || !w.offersDRA() {
		return false
	}
	w.disk.SetFault(func(op disk.Op, file string) error {
		if op == disk.Write && strings.HasPrefix(file, agents.StateDir+"/claims/") {
			time.Sleep(w.chance.UpTo(3 * time.Second))
		}
		return nil
	})
	w.lasting.startFault(diskFault, 5*time.Second, func() { w.disk.SetFault(nil) })
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
func joinEnding(w *World) bool {
	if w.isDown() || w.lasting.goesOn(diskFault) || !w.offersDRA() || !w.kubelet.IsUp() {
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
	w.lasting.startFault(diskFault, 20*time.Second, func() {
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
func podUnseen(w *World) bool {
	if w.minor < 37 || w.isDown() || !w.offersDRA() || !w.kubelet.IsUp() || !w.usage.Processes.Reclaims() || !w.usage.Writes.AllowsResets() {
		return false
	}
	makeRoom(w)
	p := w.cluster.NewPod("pod")
	p.Own, p.Claims, p.Group = false, []string{p.Name + "-claim"}, p.Name+"-group"
	p.Stubborn, p.Life, p.Lingers = false, 5*time.Second, time.Minute
	w.server.Put(cluster.NewClaim(p.Claims[0], 1))
	w.cluster.SubmitPod(p)
	time.Sleep(w.chance.UpTo(2 * time.Second))
	if p.Bound && apiDown(w) {
		time.Sleep(p.Life + p.Lingers) // until an agent would reset the device
		w.history.CountFault("podUnseen")
	}
	return true
}

// keepOpen lets a process of a pod keep its device open for a minute after the end of the container,
// while another pod waits for the device. The administrator has requested reclaim of all devices.
func keepOpen(w *World) bool {
	if w.isDown() || !w.offersDRA() || !w.kubelet.IsUp() || len(w.agents.LivingAgents()) == 0 {
		return false
	}
	w.settings.Reclaim = []discovery.Selection[reclaim.Rule]{reclaimsAll}
	w.usage.Processes.SetReclaim(true)
	w.tell(agent.Change{Settings: w.settings})
	time.Sleep(usage.LearnTime)
	makeRoom(w)
	p := w.submitPod(func(claim *resourceapi.ResourceClaim) {
		selectDevice(claim, `device.attributes["chandler.dev"].kind != "nic"`) // most adapters have no device nodes
	})
	p.Stubborn, p.Lingers = false, time.Minute
	if w.waitFor(func() bool { return w.usage.Processes.DeviceOf(p.UID) != "" }) { // another process may still have the device open
		w.replacePod(p, w.usage.Processes.DeviceOf(p.UID))
		w.history.CountFault("deviceKeptOpen")
	}
	return true
}

// makeRoom ends a pod that alone has its claims.
func makeRoom(w *World) {
	if room := w.cluster.PickPod(func(room *cluster.Pod) bool { return room.Bound && room.Own && len(room.Claims) > 0 }); room != nil {
		w.cluster.DeletePod(room, false)
		time.Sleep(room.Grace + time.Second)
		w.cluster.ForgetEnded()
	}
}

// failCalls makes the API server answer calls of the agent with a fault.
func failCalls(w *World, name string, longest time.Duration, f apiserver.Fault) bool {
	if slices.ContainsFunc([]string{"apiDown", "apiSlow", "apiThrottles", "apiConflicts", "apiForbids"}, w.lasting.goesOn) {
		return false
	}
	w.server.SetFault(f)
	w.lasting.startFault(name, longest, func() { w.server.SetFault(nil) })
	return true
}

func apiDown(w *World) bool {
	done := failCalls(w, "apiDown", 90*time.Second, func(context.Context, apiserver.Call) error {
		w.history.CountFault("apiDown")
		return apiserver.ErrDown
	})
	if done {
		w.server.EndWatches()
	}
	return done
}

func apiSlow(w *World) bool {
	return failCalls(w, "apiSlow", 30*time.Second, func(ctx context.Context, _ apiserver.Call) error {
		w.history.CountFault("apiSlow")
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(w.chance.UpTo(8 * time.Second)):
			return nil
		}
	})
}

func apiThrottles(w *World) bool {
	return failCalls(w, "apiThrottles", 30*time.Second, func(_ context.Context, call apiserver.Call) error {
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

func apiConflicts(w *World) bool {
	return failCalls(w, "apiConflicts", 30*time.Second, func(_ context.Context, call apiserver.Call) error {
		if call.Verb != "update" && call.Verb != "apply" && call.Verb != "delete" || !w.chance.OneIn(2) {
			return nil
		}
		w.history.CountFault("apiConflicts")
		return apierrors.NewConflict(schema.GroupResource{Resource: call.Resource}, "", nil)
	})
}

func apiForbids(w *World) bool {
	return failCalls(w, "apiForbids", 40*time.Second, func(_ context.Context, call apiserver.Call) error {
		if call.Resource == "nodes" || call.Resource == "pods" {
			return nil
		}
		w.history.CountFault("apiForbids")
		return apiserver.ForbiddenError(call.Resource)
	})
}

func listsStale(w *World) bool {
	if w.lasting.goesOn("listsStale") {
		return false
	}
	w.server.FreezeLists()
	w.lasting.startFault("listsStale", 40*time.Second, w.server.ThawLists)
	w.history.CountFault("listsStale")
	return true
}

func schedulerBehind(w *World) bool {
	if w.lasting.goesOn("schedulerBehind") {
		return false
	}
	w.cluster.Lag = int64(1 + w.random.IntN(30))
	w.lasting.startFault("schedulerBehind", 30*time.Second, func() { w.cluster.Lag = 0 })
	w.history.CountFault("schedulerBehind")
	return true
}

// dropFields gives the API server the features of another version.
func dropFields(w *World) bool {
	minor := chance.PickOne(w.random, 34, 35, 36, 37)
	w.history.Log("the API server keeps the fields of Kubernetes 1.%d", minor)
	w.server.ChangeFeatures(featuresOf(minor))
	w.history.CountFault("fieldsDropped")
	return true
}

func deleteNode(w *World) bool {
	if w.isDown() {
		return false
	}
	w.history.Log("the node is deleted and made anew")
	w.server.Delete(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}})
	w.server.Put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}})
	w.history.CountFault("nodeDeleted")
	return true
}

func deleteSlices(w *World) bool {
	if w.server.DeleteSlices(nodeName) == 0 {
		return false
	}
	w.history.Log("all slices of the node are deleted")
	w.history.CountFault("slicesDeleted")
	return true
}
