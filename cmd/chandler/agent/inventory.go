package agent

import (
	"slices"
	"strings"
	"time"

	"chandler.dev/cmd/chandler/agent/telemetry"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/inventory"
)

// inventoryFacts returns the present devices and allocations of the node, and false while they are
// unknown. It sends no request to the API server or the kubelet: pods come from the kubelet's last
// listing. The times of claims are read from disk.
func (a *agent) inventoryFacts() (inventory.Facts, bool) {
	p := a.placedDevices.Load()
	if p == nil {
		return inventory.Facts{}, false
	}
	facts := telemetry.PlacedFacts(p, a.ledger.View, a.cluster.LastListing(), a.ledger.Since)
	facts.Notes = a.notes(a.driver.Publisher.Refusal())
	facts.Name, facts.Version, facts.Families, facts.At = a.NodeName, a.Version, len(a.Families), time.Now()
	if of := a.classes.resources.Load(); of != nil {
		facts.Installed = func(class string) bool { _, installed := (*of)[class]; return installed }
	}
	return facts, true
}

// notes returns the problems of the node as a whole: slices that the API server refuses (refusal is
// the reason, or ""), a configuration that is not in force, and scans that do not end.
func (a *agent) notes(refusal string) (notes []inventory.Note) {
	if refusal != "" {
		notes = append(notes, inventory.Note{Name: "ResourceSlices", Reason: "the API server refuses them: " + refusal, Code: "CH0615"})
	}
	if wrong := a.settings.configError(); wrong != nil {
		notes = append(notes, inventory.Note{Name: "configuration", Reason: wrong.Error(), Code: "CH0703"})
	}
	if fields := a.settings.outdatedFields(); len(fields) > 0 {
		notes = append(notes, inventory.Note{Name: "configuration", Reason: "a change of " + strings.Join(fields, ", ") + " is in force once the agent is started again", Code: "CH0710"})
	}
	notes = append(notes, a.missingPrograms()...)
	last := a.metrics.LastScan()
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
