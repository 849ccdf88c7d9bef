package placement

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// Standing is the present state of a node, the input of the placement of devices.
type Standing struct {
	Rules   *rules.Rules // the rules in force
	Devices *discovery.Snapshot
	Entries []allocation.Entry        // all allocations
	API     map[string]discovery.Mode // the last decision by physical device; see [ReadPlacement]
	Auto    discovery.Mode            // the last choice for mode Auto; see [ReadPlacement]
}

// Fate is the effect of a change of the rules on a device.
type Fate string

// All fates.
const (
	Stays    Fate = "stays"    // the device stays with its API
	Moves    Fate = "moves"    // a free device moves to another API at once
	Waits    Fate = "waits"    // the device is withheld until its consumers have ended
	Changes  Fate = "changes"  // the sharing changes at once
	Excluded Fate = "excluded" // the device is excluded at once
)

// Step is the effect on one device, with the reason.
type Step struct {
	Device    string             `json:"device"`
	Resources []string           `json:"resources,omitempty"` // its extended resource names
	From      discovery.Mode     `json:"from,omitempty"`
	To        discovery.Mode     `json:"to,omitempty"` // the wanted API
	Fate      Fate               `json:"fate"`
	Owners    []allocation.Owner `json:"-"`
	Reason    string             `json:"reason,omitempty"`
}

// PlanSteps returns the effect of new rules on each device. With the same rules it returns the
// steps that have not been completed yet. PlanSteps decides like an agent: free devices move, and
// the others wait. It leaves out facts that only the API server has, such as claims that are
// allocated and not prepared.
func (s Standing) PlanSteps(next *rules.Rules) []Step {
	devices := newRuled(s.Rules, nil)
	devices.applyScan(s.Devices)
	view := func() *ledger.View {
		return ledger.ViewOf(&exclusion.Present{Snapshot: devices.snapshot}, s.Entries...)
	}
	devices.keepExcluded(view())
	before := devices.snapshot
	if s.API == nil { // no agent has run yet
		s.API = devices.placeDevices(nil, view(), Facts{AutoMode: s.Auto, Published: &Published{}}, nil).API
	}
	if next != s.Rules {
		devices.changeRules(next)
	}
	facts := Facts{AutoMode: s.Auto, Published: &Published{}, Unknown: next.WithheldReason()}
	placement := devices.placeDevices(s.API, view(), facts, nil)

	steps := make([]Step, 0, len(before.Devices))
	names := make(map[string]bool)
	for _, all := range [][]rules.Offered{before.Devices, devices.snapshot.Devices} { // the latter for devices that the old rules exclude
		for _, d := range all {
			if !names[d.Name] {
				names[d.Name] = true
				steps = append(steps, s.planStep(d, devices.snapshot, placement))
			}
		}
	}
	slices.SortFunc(steps, func(a, b Step) int { return strings.Compare(a.Device, b.Device) })
	return steps
}

// planStep returns the effect on a device, given its earlier description.
func (s Standing) planStep(was rules.Offered, after *rules.Snapshot, placement Placement) Step {
	silicon := was.Silicon()
	step := Step{Device: was.Name, From: s.API[silicon], To: placement.API[silicon], Fate: Stays, Reason: placement.Moving[silicon]}
	d, there := after.Lookup(was.Name)
	if !there {
		step.Fate, step.To, d = Excluded, "", was
	}
	for _, offer := range d.Offers {
		step.Resources = append(step.Resources, offer.Resource)
	}
	switch {
	case step.Reason != "":
		step.Fate, step.Owners = Waits, s.owners(silicon, after)
		step.To = d.Mode
		if step.To == discovery.ModeAuto {
			step.To = s.Auto
		}
	case !there:
	case step.From != step.To:
		step.Fate = Moves
	case was.ShareForm() != d.ShareForm():
		step.Fate = Changes
	}
	return step
}

// owners returns the owners of any part of a physical device, without duplicates.
func (s Standing) owners(silicon string, snapshot *rules.Snapshot) (owners []allocation.Owner) {
	for _, e := range s.Entries {
		has := slices.ContainsFunc(e.Holds(), func(h allocation.Hold) bool {
			d, found := snapshot.Lookup(h.Device)
			return !h.Open && (h.Silicon == silicon || found && d.Silicon() == silicon)
		})
		if has && !slices.Contains(owners, e.Owner()) {
			owners = append(owners, e.Owner())
		}
	}
	return owners
}

// ReadPlacement returns the API of each physical device, and the agent's choice for mode Auto, from
// the files in the agent's directory. Both are empty if no agent has run yet.
func ReadPlacement(dir fs.FS) (api map[string]discovery.Mode, auto discovery.Mode, err error) {
	data, err := fs.ReadFile(dir, placementFile)
	if err == nil {
		api, err = parsePlacement(data)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, "", fmt.Errorf("read which API offers what: %w", err)
	}
	data, err = fs.ReadFile(dir, autoFile)
	if err == nil {
		auto, err = parseAuto(data)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, "", fmt.Errorf("read the API that was chosen: %w", err)
	}
	return api, auto, nil
}

// parsePlacement decodes the file of a placement.
func parsePlacement(data []byte) (api map[string]discovery.Mode, err error) {
	if err := json.Unmarshal(data, &api); err != nil {
		return nil, err
	}
	for silicon, mode := range api {
		if mode != discovery.ModeDRA && mode != discovery.ModeDevicePlugin {
			return nil, fmt.Errorf("silicon %s: there is no API %q", silicon, mode)
		}
	}
	return api, nil
}

// parseAuto decodes the file of the choice for mode Auto.
func parseAuto(data []byte) (discovery.Mode, error) {
	mode := discovery.Mode(data)
	if mode != discovery.ModeDRA && mode != discovery.ModeDevicePlugin {
		return "", fmt.Errorf("there is no API %q", mode)
	}
	return mode, nil
}
