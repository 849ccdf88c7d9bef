package agent

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
)

// Standing is how things are on a node: what an agent on it goes by when it places
// devices.
type Standing struct {
	Rules   *rules.Rules // in force
	Devices *discovery.Snapshot
	Entries []ledger.Entry            // who has what
	API     map[string]discovery.Mode // by silicon, as it was decided last; see [ReadPlacement]
	Auto    discovery.Mode            // likewise
}

// Fate is what becomes of a device.
type Fate string

// The fates.
const (
	Stays    Fate = "stays"    // with its API
	Moves    Fate = "moves"    // to another API at once, since nobody has it
	Waits    Fate = "waits"    // for who has it, and is withheld until then
	Changes  Fate = "changes"  // in how it is shared, at once
	Excluded Fate = "excluded" // at once
)

// Step says what becomes of a device, and why.
type Step struct {
	Device    string         `json:"device"`
	Resources []string       `json:"resources,omitempty"` // its classic names
	From      discovery.Mode `json:"from,omitempty"`
	To        discovery.Mode `json:"to,omitempty"` // where it is to be
	Fate      Fate           `json:"fate"`
	Owners    []ledger.Owner `json:"-"`
	Reason    string         `json:"reason,omitempty"`
}

// Plan says what becomes of each device when the rules become others. With the same
// rules it says what has not become of them yet. It goes the way of an agent: free
// devices move, and the rest waits. It does not include facts that only the API server
// knows, such as claims that are allocated and not prepared.
func (s Standing) Plan(next *rules.Rules) []Step {
	devices := newRuled(s.Rules)
	devices.see(s.Devices)
	view := func() *ledger.View {
		return ledger.ViewOf(&ledger.Present{Snapshot: devices.snapshot}, s.Entries...)
	}
	devices.keepExcluded(view())
	before := devices.snapshot
	if s.API == nil { // there is no agent yet
		s.API = devices.place(nil, view(), Facts{Auto: s.Auto, Published: &Published{}}, nil).API
	}
	if next != s.Rules {
		devices.change(next)
	}
	facts := Facts{Auto: s.Auto, Published: &Published{}, Unknown: next.Unknown}
	placement := devices.place(s.API, view(), facts, nil)

	steps := make([]Step, 0, len(before.Devices))
	names := make(map[string]bool)
	for _, all := range [][]rules.Offered{before.Devices, devices.snapshot.Devices} { // the latter for those that are not excluded any more
		for _, d := range all {
			if !names[d.Name] {
				names[d.Name] = true
				steps = append(steps, s.step(d, devices.snapshot, placement))
			}
		}
	}
	slices.SortFunc(steps, func(a, b Step) int { return strings.Compare(a.Device, b.Device) })
	return steps
}

// step says what becomes of a device as it was.
func (s Standing) step(was rules.Offered, after *rules.Snapshot, placement Placement) Step {
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
	case was.Form() != d.Form():
		step.Fate = Changes
	}
	return step
}

// owners returns who has anything of silicon, each once.
func (s Standing) owners(silicon string, snapshot *rules.Snapshot) (owners []ledger.Owner) {
	for _, e := range s.Entries {
		has := slices.ContainsFunc(e.Holds(), func(h ledger.Hold) bool {
			d, found := snapshot.Lookup(h.Device)
			return !h.Open && (h.Silicon == silicon || found && d.Silicon() == silicon)
		})
		if has && !slices.Contains(owners, e.Owner()) {
			owners = append(owners, e.Owner())
		}
	}
	return owners
}

// ReadPlacement returns which API offers each silicon, and which one the agent chose where
// the configuration leaves it the choice, as the agent wrote it down in its directory. Both
// are empty if there is no agent yet.
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

// parsePlacement reads the file of a placement.
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

// parseAuto reads the file of the choice.
func parseAuto(data []byte) (discovery.Mode, error) {
	mode := discovery.Mode(data)
	if mode != discovery.ModeDRA && mode != discovery.ModeDevicePlugin {
		return "", fmt.Errorf("there is no API %q", mode)
	}
	return mode, nil
}
