package simulation

import (
	"errors"
	"time"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/simulation/usage"
)

// surgeAgent starts another agent, and ends the first a while later.
func surgeAgent(w *World) bool {
	w.agents.DropDead()
	if !w.surges || len(w.agents.LivingAgents()) != 1 || w.lasting.goesOn("surge") || w.lasting.goesOn(wrongSurge) {
		return false
	}
	old := w.agents.LivingAgents()[0]
	w.startAgent()
	w.lasting.startFault("surge", 10*time.Second, func() {
		w.history.Log("%s is told to end", old.Name)
		w.agents.End(old)
	})
	w.history.CountFault("surge")
	return true
}

// wrongSurge names the event of an agent with an invalid configuration next to another agent.
const wrongSurge = "surge with a wrong configuration"

// surgeWrong starts another agent with an invalid configuration. The first agent continues, because
// the new agent is not ready, until the update is reverted or the configuration is fixed.
func surgeWrong(w *World) bool {
	w.agents.DropDead()
	if !w.surges || len(w.agents.LivingAgents()) != 1 || w.lasting.goesOn("surge") || w.lasting.goesOn(wrongSurge) {
		return false
	}
	old := w.agents.LivingAgents()[0]
	settings := w.settings // as the first agent has stored them in a file
	if w.random.IntN(3) == 0 {
		w.usage.Processes.MarkUnsure(2 * usage.LearnTime) // the new agent hands over nothing
		// Settings that agents read only at their start stay unchanged.
		settings = agent.Settings{Passthrough: settings.Passthrough, VirtualFunctions: settings.VirtualFunctions, Rules: &rules.Rules{Mode: discovery.ModeAuto, Unknown: "the configuration is invalid"}}
	}
	next := w.startAgentWith(settings, errors.New("exclude[0].cel: no such field"))
	w.lasting.startFault(wrongSurge, time.Minute, func() {
		if w.random.IntN(2) == 0 && !old.IsDead() && w.agents.IsLiving(old) {
			w.history.Log("%s is told to end, since the update is taken back", next.Name)
			w.agents.End(next)
			return
		}
		w.history.Log("the configuration of %s is fixed", next.Name)
		if next.IsDead() {
			return
		}
		if next.Wrong.Swap(false) && !next.Tell(agent.Change{Settings: w.settings}) { // the configuration was not fixed in the meantime
			next.Kill() // and the pod restarts with the valid configuration
		}
		if w.agents.IsLiving(old) && len(w.agents.LivingAgents()) > 1 {
			time.Sleep(2 * time.Second) // until the agent is ready
			w.history.Log("%s is told to end", old.Name)
			w.agents.End(old)
		}
	})
	w.history.CountFault("surgeWrong")
	return true
}

// checkCalls fails if the kubelet calls an agent with an invalid configuration while another agent
// works: calls would wait there without success.
func checkCalls(w *World) {
	called := w.kubelet.CalledProcess()
	for _, i := range w.agents.LivingAgents() {
		if i.Name != called || !i.Wrong.Load() || i.IsDead() {
			continue
		}
		holder, _ := w.agents.Lock.Holder()
		if holder != nil && holder != i && !holder.IsDead() {
			w.history.Fail("the kubelet calls %s, whose configuration is wrong, and not %s, which works", i.Name, holder.Name)
		}
	}
}
