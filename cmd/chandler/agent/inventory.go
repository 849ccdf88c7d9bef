package agent

import (
	"io/fs"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
)

// inventoryFacts returns the present devices and allocations of the node, and false while they are
// unknown. It sends no request to the API server or the kubelet: pods come from the kubelet's last
// listing. The times of claims are read from disk.
func (a *agent) inventoryFacts() (inventory.Facts, bool) {
	p := a.placedDevices.Load()
	if p == nil {
		return inventory.Facts{}, false
	}
	facts := placedFacts(p, a.ledger.View, a.cluster.LastListing(), a.ledger.Since)
	facts.Notes = a.notes(a.driver.Publisher.Refusal())
	facts.Name, facts.Version, facts.Families, facts.At = a.NodeName, a.Version, len(a.Families), time.Now()
	if of := a.classResources.Load(); of != nil {
		facts.Installed = func(class string) bool { _, installed := (*of)[class]; return installed }
	}
	return facts, true
}

// placedFacts returns the part of an inventory that concerns devices.
func placedFacts(p *placement.Placed, view func(ledger.Stock) *ledger.View, said *kubeletapi.Listing, since func(types.UID) time.Time) inventory.Facts {
	facts := inventory.Facts{
		Snapshot: p.Snapshot, ConsumersKnown: true, API: p.Placement.API, Moves: make(map[string]inventory.Move),
		Holders: Holders(view(&ledger.Present{Snapshot: p.Snapshot}), said, since),
	}
	for silicon, reason := range p.Placement.Moving {
		facts.Moves[silicon] = inventory.Move{To: p.Placement.To[silicon], Reason: reason, Since: p.WaitingSince[silicon]}
	}
	return facts
}

// notes returns the problems of the node as a whole: slices that the API server refuses (refusal is
// the reason, or ""), a configuration that is not in force, and scans that do not end.
func (a *agent) notes(refusal string) (notes []inventory.Note) {
	if refusal != "" {
		notes = append(notes, inventory.Note{Name: "ResourceSlices", Reason: "the API server refuses them: " + refusal, Code: "CH0615"})
	}
	if wrong := a.configError(); wrong != nil {
		notes = append(notes, inventory.Note{Name: "configuration", Reason: wrong.Error(), Code: "CH0703"})
	}
	if fields := a.outdatedFields(); len(fields) > 0 {
		notes = append(notes, inventory.Note{Name: "configuration", Reason: "a change of " + strings.Join(fields, ", ") + " is in force once the agent is started again", Code: "CH0710"})
	}
	notes = append(notes, a.missingPrograms()...)
	last := a.metrics.lastScan.Load()
	if last == nil {
		return notes
	}
	if len(last.Late) > 0 {
		notes = append(notes, inventory.Note{Name: "scan", Reason: "no answer in time from " + strings.Join(last.Late, ", ") + "; their devices count as unreadable", Code: "CH0310"})
	} else if last.Hanging > 0 {
		notes = append(notes, inventory.Note{Name: "scan", Reason: inventory.CountNoun(last.Hanging, "read") + " of the host not answered by a driver", Code: "CH0310"})
	}
	return notes
}

// missingPrograms notes the families whose devices lack facts, because the program with these facts
// does not run although the vendor's driver is loaded.
func (a *agent) missingPrograms() (notes []inventory.Note) {
	p := a.placedDevices.Load()
	if p == nil {
		return nil
	}
	for _, f := range a.Families {
		if !slices.ContainsFunc(p.Snapshot.Devices, func(d rules.Offered) bool { return d.Family == f.Name }) {
			continue
		}
		for _, program := range f.Programs {
			if program.Provides != "" && a.host.FileExists(program.Driver) && !a.host.FileExists(program.File) {
				notes = append(notes, inventory.Note{Name: "family " + f.Name, Reason: program.Provides + " are unknown without " + program.Library, Code: "CH0617"})
			}
		}
	}
	return notes
}

// InventoryFacts returns the inventory of a standing, as far as the standing contains it. said is
// the kubelet's listing and may be nil; kubelet is the kubelet's directory, and dir the agent's
// directory in it.
func InventoryFacts(s placement.Standing, said *kubeletapi.Listing, kubelet fs.FS, dir string) inventory.Facts {
	snapshot := s.Rules.ApplyTo(s.Devices)
	since := func(claim types.UID) time.Time { return ledger.ReadSince(kubelet, dir, claim) }
	facts := inventory.Facts{
		Snapshot: snapshot, ConsumersKnown: true, API: s.API, Moves: make(map[string]inventory.Move),
		Holders: Holders(ledger.ViewOf(&ledger.Present{Snapshot: snapshot}, s.Entries...), said, since),
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
