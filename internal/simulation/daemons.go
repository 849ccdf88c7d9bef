package simulation

import (
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"

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

// killSupervisor kills the supervisor, alone or with its daemons. In the second case, the pod of a
// daemon ends too, if possible, and another pod requests its GPU, whose mode no process restores.
func killSupervisor(w *World) bool {
	if !w.machine.Daemons || w.lasting.goesOn("supervisorKilled") {
		return false
	}
	withDaemons := w.random.IntN(2) == 0
	gpu := chance.PickOne(w.random, w.cards...).Address
	var pod *cluster.Pod
	if withDaemons && len(w.settings.Rules.Sharing) == 0 && !w.pluginOnly() && !w.isDown() && !w.lasting.goesOn("kubeletDown") {
		pod = w.submitForGPU(gpu, machine.ConfigWith(machine.AsMPS))
		claim := w.server.Claim(cluster.Namespace, pod.Claims[0]).UID
		for range 80 { // 20 seconds, if another pod has the GPU
			if w.supervisor.LacksDaemon(claim) == "" {
				break
			}
			time.Sleep(250 * time.Millisecond)
		}
	}
	w.history.Log("the supervisor is killed, with its daemons: %v", withDaemons)
	w.supervisor.Kill(withDaemons)
	w.lasting.startFault("supervisorKilled", time.Minute, w.supervisor.RestartProcess)
	w.history.CountFault("supervisorKilled")
	if pod != nil {
		w.cluster.DeletePod(pod, false)
		w.submitForGPU(gpu, nil)
	}
	return true
}

// submitForGPU creates a pod with a claim for the GPU at an address.
func (w *World) submitForGPU(address string, config []resourceapi.DeviceClaimConfiguration) *cluster.Pod {
	p := w.cluster.NewPod("pod")
	p.Claims = []string{p.Name + "-claim"}
	claim := cluster.NewClaim(p.Claims[0], 1)
	expression := fmt.Sprintf(`device.attributes["resource.kubernetes.io"].pciBusID == %q`, address)
	claim.Spec.Devices.Requests[0].Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	claim.Spec.Devices.Config = config
	w.server.Put(claim)
	w.cluster.SubmitPod(p)
	return p
}

// modesRefused makes changes of the modes of GPUs fail for a while.
func modesRefused(w *World) bool {
	if !w.machine.Daemons || w.lasting.goesOn("modesRefused") {
		return false
	}
	w.supervisor.RefuseModes(true)
	w.lasting.startFault("modesRefused", time.Minute, func() { w.supervisor.RefuseModes(false) })
	w.history.CountFault("modesRefused")
	return true
}

// killDaemon ends the daemon of a claim.
func killDaemon(w *World) bool {
	if !w.supervisor.KillDaemon(w.random) {
		return false
	}
	w.history.CountFault("daemonDies")
	return true
}
