package simulation

import (
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/internal/simulation/machine"
)

// specifyDaemon makes some claims request an MPS daemon. A daemon needs whole devices.
func specifyDaemon(w *World, claim *resourceapi.ResourceClaim) {
	if w.machine.Daemons && len(w.settings.Rules.Sharing) == 0 && w.random.IntN(2) == 0 {
		claim.Spec.Devices.Config = machine.ConfigWith(machine.AsMPS)
	}
}

// killSupervisor kills the supervisor, alone or with its daemons.
func killSupervisor(w *World) bool {
	if !w.machine.Daemons || w.lasting.goesOn("supervisorKilled") {
		return false
	}
	withDaemons := w.random.IntN(2) == 0
	w.history.Log("the supervisor is killed, with its daemons: %v", withDaemons)
	w.supervisor.Kill(withDaemons)
	w.lasting.startFault("supervisorKilled", time.Minute, w.supervisor.RestartProcess)
	w.history.CountFault("supervisorKilled")
	return true
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
