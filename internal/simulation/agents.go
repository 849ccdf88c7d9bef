package simulation

import (
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/internal/simulation/agents"
)

// startAgent starts another agent on the node.
func (w *World) startAgent() *agents.Agent { return w.startAgentWith(w.settings, nil) }

// startAgentWith starts an agent with settings. wrong is the error if the configuration is invalid.
func (w *World) startAgentWith(settings agent.Settings, wrong error) *agents.Agent {
	if w.damage.HasLostRecords() {
		w.usage.ForgetUses()
	}
	w.usage.Parts.ForgetNumbers()
	w.damage.AgentStarts()
	return w.agents.Start(agents.Start{Boot: w.host.BootID(), Settings: settings, ConfigError: wrong, HasUID: w.surges})
}

// sendUevent sends an event of the kernel to all living agents. Only the root goroutine may call
// sendUevent.
func (w *World) sendUevent() {
	for _, a := range w.agents.LivingAgents() {
		a.SendUevent()
	}
}

// watcher observes the agents of a world.
type watcher struct{ *World }

// RecordRemoved implements [agents.Watcher].
func (w watcher) RecordRemoved(file, boot string) { w.usage.CheckReallocated(file, boot) }

// FileRenamed implements [agents.Watcher].
func (w watcher) FileRenamed(file string) { w.usage.Writes.NoteRecord(file) }

// HostWritten implements [agents.Watcher].
func (w watcher) HostWritten(name, value string) { w.usage.Writes.CheckWrite(name, value) }

// LockAcquired implements [agents.Watcher]. Records may have been wiped after the start of the agent.
func (w watcher) LockAcquired() {
	if w.damage.HasLostRecords() {
		w.usage.ForgetUses()
	}
}

// AgentDies implements [agents.Watcher].
func (w watcher) AgentDies() { w.damage.AgentDies() }
