package simulation

import (
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/internal/simulation/machine"
)

// specifyDaemon makes some claims request an MPS daemon. A daemon needs whole devices.
func (w *World) specifyDaemon(claim *resourceapi.ResourceClaim) {
	if w.machine.Daemons && len(w.settings.Rules.Sharing) == 0 && w.random.IntN(2) == 0 {
		claim.Spec.Devices.Config = machine.ConfigWith(machine.AsMPS)
	}
}

// killSupervisor kills the supervisor, alone or with its daemons.
func (w *World) killSupervisor() bool {
	if !w.machine.Daemons || w.goesOn("supervisorKilled") {
		return false
	}
	withDaemons := w.random.IntN(2) == 0
	w.history.Log("the supervisor is killed, with its daemons: %v", withDaemons)
	w.supervisor.Kill(withDaemons)
	w.startFault("supervisorKilled", time.Minute, w.supervisor.RestartProcess)
	w.history.CountFault("supervisorKilled")
	return true
}

// modesRefused makes changes of the modes of GPUs fail for a while.
func (w *World) modesRefused() bool {
	if !w.machine.Daemons || w.goesOn("modesRefused") {
		return false
	}
	w.supervisor.RefuseModes(true)
	w.startFault("modesRefused", time.Minute, func() { w.supervisor.RefuseModes(false) })
	w.history.CountFault("modesRefused")
	return true
}

// killDaemon ends the daemon of a claim.
func (w *World) killDaemon() bool {
	if !w.supervisor.KillDaemon(w.random) {
		return false
	}
	w.history.CountFault("daemonDies")
	return true
}
