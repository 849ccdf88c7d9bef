package simulation

import (
	"errors"
	"slices"
	"time"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// surge starts another agent, and ends the first a while later.
func (w *World) surge() bool {
	w.clean()
	if !w.surges || len(w.living) != 1 || w.goesOn("surge") || w.goesOn(wrongSurge) {
		return false
	}
	old := w.living[0]
	w.startAgent()
	w.during("surge", 10*time.Second, func() {
		w.log("%s is told to end", old.name)
		old.cancel()
		w.living = slices.DeleteFunc(w.living, func(i *incarnation) bool { return i == old })
	})
	w.saw("surge")
	return true
}

// wrongSurge goes on while an agent with a wrong configuration is beside another.
const wrongSurge = "surge with a wrong configuration"

// surgeWrong starts another agent, whose configuration is wrong. The first one goes on, since the
// newcomer is not ready, until somebody takes the update back or mends the configuration.
func (w *World) surgeWrong() bool {
	w.clean()
	if !w.surges || len(w.living) != 1 || w.goesOn("surge") || w.goesOn(wrongSurge) {
		return false
	}
	old := w.living[0]
	settings := w.settings // as the first one has kept it in a file
	if w.random.IntN(3) == 0 {
		w.unsure(2 * learn) // that agent hands nothing over
		// Settings that agents take only at their start stay as they were.
		settings = agent.Settings{Rebind: settings.Rebind, VirtualFunctions: settings.VirtualFunctions, Rules: &rules.Rules{Mode: discovery.ModeAuto, Unknown: "the configuration is wrong"}}
	}
	next := w.startAgentWith(settings, errors.New("exclude[0].cel: no such field"))
	w.during(wrongSurge, time.Minute, func() {
		if w.random.IntN(2) == 0 && !old.dead.Load() && slices.Contains(w.living, old) {
			w.log("%s is told to end, since the update is taken back", next.name)
			next.cancel()
			w.living = slices.DeleteFunc(w.living, func(i *incarnation) bool { return i == next })
			return
		}
		w.log("the configuration of %s is mended", next.name)
		if next.dead.Load() {
			return
		}
		if next.wrong.Swap(false) && !next.tell(agent.Change{Settings: w.settings}) { // nobody has mended it meanwhile
			next.die() // and its pod starts again with the right one
		}
		if slices.Contains(w.living, old) && len(w.living) > 1 {
			time.Sleep(2 * time.Second) // until it is ready
			w.log("%s is told to end", old.name)
			old.cancel()
			w.living = slices.DeleteFunc(w.living, func(i *incarnation) bool { return i == old })
		}
	})
	w.saw("surgeWrong")
	return true
}

// checkCalls demands that the kubelet calls no agent with a wrong configuration while another
// one works: calls would wait there in vain.
func (w *World) checkCalls() {
	called := w.kubelet.Calls()
	for _, i := range w.living {
		if i.name != called || !i.wrong.Load() || i.dead.Load() {
			continue
		}
		w.lock.mu.Lock()
		holder := w.lock.holder
		w.lock.mu.Unlock()
		if holder != nil && holder != i && !holder.dead.Load() {
			w.fail("the kubelet calls %s, whose configuration is wrong, and not %s, which works", i.name, holder.name)
		}
	}
}
