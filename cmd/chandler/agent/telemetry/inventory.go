package telemetry

import (
	"io/fs"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// PlacedFacts returns the part of an inventory that concerns devices.
func PlacedFacts(p *placement.Placed, view func(exclusion.Stock) *ledger.View, said *kubeletapi.Listing, since func(types.UID) time.Time) inventory.Facts {
	facts := inventory.Facts{
		Snapshot: p.Snapshot, ConsumersKnown: true, API: p.Placement.API, Moves: make(map[string]inventory.Move),
		Holders: Holders(view(&exclusion.Present{Snapshot: p.Snapshot}), said, since),
	}
	for silicon, reason := range p.Placement.Moving {
		facts.Moves[silicon] = inventory.Move{To: p.Placement.To[silicon], Reason: reason, Since: p.WaitingSince[silicon]}
	}
	return facts
}

// StandingFacts returns the inventory of a standing, as far as the standing contains it. said is
// the kubelet's listing and may be nil; kubelet is the kubelet's directory, and dir the agent's
// directory in it.
func StandingFacts(s placement.Standing, said *kubeletapi.Listing, kubelet fs.FS, dir string) inventory.Facts {
	snapshot := s.Rules.ApplyTo(s.Devices)
	since := func(claim types.UID) time.Time { return allocation.ReadSince(kubelet, dir, claim) }
	facts := inventory.Facts{
		Snapshot: snapshot, ConsumersKnown: true, API: s.API, Moves: make(map[string]inventory.Move),
		Holders: Holders(ledger.ViewOf(&exclusion.Present{Snapshot: snapshot}, s.Entries...), said, since),
	}
	if s.API == nil {
		return facts
	}
	for _, step := range s.PlanSteps(s.Rules) {
		if d, found := snapshot.Lookup(step.Device); found && step.Fate == placement.Waits {
			move := inventory.Move{To: step.To, Reason: step.Reason}
			if step.To == step.From {
				move.To = discovery.ModeAuto
			}
			facts.Moves[d.Silicon()] = move
		}
	}
	return facts
}
