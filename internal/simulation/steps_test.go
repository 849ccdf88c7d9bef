package simulation

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/internal/simulation/machine"
)

// TestLimit demands the longer limit if the API server's features have changed since the active
// agent detected them, also after the start of a second agent, which waits for the lock.
func TestLimit(t *testing.T) {
	if _, err := machine.All(); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		w := NewWorld(1)
		w.surges = true
		demand := func(when string, limit time.Duration) {
			t.Helper()
			time.Sleep(time.Second)
			if got := w.convergenceLimit(); got != limit {
				t.Errorf("%s: the limit is %s, not %s", when, got, limit)
			}
		}
		w.cluster.AddAgentPod(agentPod)
		w.kubelet.StartKubelet()
		w.startAgent()
		demand("the agent has started", convergeLimit)
		w.server.ChangeFeatures(w.server.Features())
		demand("the features are set to the same", convergeLimit)
		other := w.server.Features()
		other.Groups = !other.Groups
		w.server.ChangeFeatures(other)
		demand("the features have changed", askLimit)
		second := w.startAgentWith(w.settings, errors.New("line 1: no such field"))
		demand("a second agent waits", askLimit)
		w.agents.End(second)
		demand("the second agent has ended", askLimit)
		w.replaceAgent(0)
		demand("another agent is active", convergeLimit)
		w.end()
	})
}
