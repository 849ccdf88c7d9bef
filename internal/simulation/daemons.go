package simulation

import (
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/cluster"
	"chandler.dev/internal/simulation/machine"
)

// specifyDaemon makes some claims request an MPS daemon. A daemon needs whole devices.
func specifyDaemon(w *World, claim *resourceapi.ResourceClaim) {
	if w.machine.Daemons && len(w.settings.Rules.Sharing) == 0 && w.random.IntN(2) == 0 {
		claim.Spec.Devices.Config = machine.ConfigWith(machine.AsMPS)
	}
}

// killSupervisor kills the supervisor, alone or with its daemons. In the second case, another pod may
// request a GPU whose mode no process restores.
func killSupervisor(w *World) bool {
	if !w.machine.Daemons || w.lasting.goesOn("supervisorKilled") {
		return false
	}
	var d daemonPod
	withDaemons := w.random.IntN(2) == 0
	if withDaemons {
		d = w.runDaemonPod()
	}
	w.history.Log("the supervisor is killed, with its daemons: %v", withDaemons)
	w.supervisor.Kill(withDaemons)
	w.lasting.startFault("supervisorKilled", time.Minute, w.supervisor.RestartProcess)
	w.history.CountFault("supervisorKilled")
	d.replace(w)
	return true
}

// daemonPod is a pod with a daemon on a GPU.
type daemonPod struct {
	pod   *cluster.Pod // nil if claims cannot have daemons at present
	claim types.UID
	gpu   string // address
}

// runDaemonPod creates a pod with a daemon on a GPU, and waits until the daemon runs.
func (w *World) runDaemonPod() (d daemonPod) {
	if len(w.settings.Rules.Sharing) > 0 || w.pluginOnly() || w.isDown() || w.lasting.goesOn("kubeletDown") {
		return d
	}
	d.gpu = chance.PickOne(w.random, w.cards...).Address
	d.pod = w.submitForDevice(d.gpu, machine.ConfigWith(machine.AsMPS))
	d.claim = w.server.Claim(cluster.Namespace, d.pod.Claims[0]).UID
	w.waitFor(func() bool { return w.supervisor.LacksDaemon(d.claim) == "" }) // another pod may have the GPU
	return d
}

// replace ends the pod, and creates another pod for its GPU, which starts as soon as possible.
func (d daemonPod) replace(w *World) {
	if d.pod == nil {
		return
	}
	w.replacePod(d.pod, d.gpu)
}

// submitForDevice creates a pod with a claim for the device at an address.
func (w *World) submitForDevice(address string, config []resourceapi.DeviceClaimConfiguration) *cluster.Pod {
	return w.submitPod(func(claim *resourceapi.ResourceClaim) {
		selectDevice(claim, atAddress(address))
		claim.Spec.Devices.Config = config
	})
}

// modesRefused makes changes of the modes of GPUs fail for a while. Meanwhile, another pod may request
// a GPU in exclusive mode.
func modesRefused(w *World) bool {
	if !w.machine.Daemons || w.lasting.goesOn("modesRefused") {
		return false
	}
	d := w.runDaemonPod()
	w.supervisor.RefuseModes(true)
	w.lasting.startFault("modesRefused", time.Minute, func() { w.supervisor.RefuseModes(false) })
	w.history.CountFault("modesRefused")
	d.replace(w)
	return true
}

// killDaemon ends the daemon of a claim. The claim may end while the daemon is started again.
func killDaemon(w *World) bool {
	if !w.machine.Daemons {
		return false
	}
	d := w.runDaemonPod()
	if !w.supervisor.KillDaemon(w.random, d.claim) {
		return false
	}
	w.history.CountFault("daemonDies")
	if d.pod != nil {
		d.pod.Stubborn = false
		w.supervisor.DelayOrder(d.claim)
		for range 60 { // the agent checks the daemons every 5 seconds
			if w.supervisor.HasDelayed() {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	d.replace(w)
	return true
}
