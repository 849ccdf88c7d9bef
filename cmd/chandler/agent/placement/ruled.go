package placement

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
)

// ruledDevices applies the administrator's rules to the devices of a host. When new rules exclude a
// device or share the device in another way, its physical device stays under the earlier rules
// until released, because a consumer may have it by the earlier names and amounts.
type ruledDevices struct {
	rules        *rules.Rules
	earlierRules map[string]*rules.Rules // by physical device that is still under earlier rules
	lastScan     *discovery.Snapshot
	snapshot     *rules.Snapshot // the result of the rules for raw, nil before the first scan

	previousForms  map[string]rules.ShareForm // the forms of the previous agent until the first scan, nil if unknown
	earlierApplied bool                       // keepExcluded has run
}

// newRuled returns a ruledDevices without devices. forms are the forms in which the previous agent
// of the node offered devices by DRA, nil if unknown. The first scan puts the rules in force like a
// change from these forms, because the scheduler may have allocated devices from the slices of that
// agent.
func newRuled(present *rules.Rules, forms map[string]rules.ShareForm) *ruledDevices {
	return &ruledDevices{rules: present, previousForms: forms, earlierRules: make(map[string]*rules.Rules)}
}

// applyScan applies the rules to a new scan.
func (r *ruledDevices) applyScan(raw *discovery.Snapshot) {
	r.lastScan = raw
	if r.previousForms == nil {
		r.applyRules()
		return
	}
	present, previous := r.rules, *r.rules
	previous.Forms, previous.ReportOnly, previous.Unknown = r.previousForms, false, ""
	r.rules, r.previousForms = &previous, nil
	r.applyRules()
	r.changeRules(present)
}

// applyRules computes the snapshot.
func (r *ruledDevices) applyRules() {
	s := r.rules.ApplyTo(r.lastScan)
	var kept []rules.Offered
	applied, names := make(map[*rules.Rules]bool), make(map[string]bool)
	for _, earlier := range r.earlierRules {
		if applied[earlier] {
			continue
		}
		applied[earlier] = true
		for _, d := range earlier.ApplyTo(r.lastScan).Devices {
			if r.earlierRules[d.Silicon()] == earlier && !names[d.Name] {
				kept, names[d.Name] = append(kept, d), true
			}
		}
	}
	// The physical devices may differ between rules: a resource joins the functions of an IOMMU
	// group.
	s.Devices = slices.DeleteFunc(s.Devices, func(d rules.Offered) bool { return r.earlierRules[d.Silicon()] != nil || names[d.Name] })
	s.Devices = append(s.Devices, kept...)
	slices.SortFunc(s.Devices, func(a, b rules.Offered) int { return strings.Compare(a.Name, b.Name) })
	r.snapshot = s
}

// changeRules puts new rules in force.
func (r *ruledDevices) changeRules(to *rules.Rules) {
	before := r.rules
	r.rules = to
	if r.lastScan == nil {
		return
	}
	offered := before.WithheldReason() == ""
	if !offered {
		r.earlierApplied = false
	}
	next := to.ApplyTo(r.lastScan)
	for silicon, devices := range bySilicon(r.snapshot) {
		switch {
		case sameForm(devices, next):
			delete(r.earlierRules, silicon)
		case offered && r.earlierRules[silicon] == nil:
			r.earlierRules[silicon] = before
		}
	}
	r.applyRules()
}

// keepExcluded keeps excluded devices that claims of an earlier process have, once the allocations
// are known. These claims are not notified of the exclusion.
func (r *ruledDevices) keepExcluded(view *ledger.View) {
	if r.earlierApplied {
		return
	}
	r.earlierApplied = true
	if len(r.rules.Exclude) == 0 {
		return
	}
	lenient := *r.rules
	lenient.Exclude = nil
	r.keepRules(&lenient, view)
}

// keepSplit keeps devices of claims that are left out because the rules give their physical device
// to two APIs. The devices may have become one physical device after the allocation: a function was
// plugged in, or the agent has restarted with a resource that wants vfio for a function of the
// IOMMU group.
func (r *ruledDevices) keepSplit(view *ledger.View) {
	if !slices.ContainsFunc(r.snapshot.Problems, func(p discovery.Problem) bool { return errors.Is(p.Err, rules.ErrSplit) }) {
		return
	}
	apart := *r.rules
	apart.Resources = nil
	r.keepRules(&apart, view)
}

// keepRules keeps the physical devices of claims under other rules if the present rules leave the
// devices out or share them in another way.
func (r *ruledDevices) keepRules(as *rules.Rules, view *ledger.View) {
	found := false
	for silicon, devices := range bySilicon(as.ApplyTo(r.lastScan)) {
		if r.earlierRules[silicon] == nil && !sameForm(devices, r.snapshot) && view.OwnerOf(discovery.ModeDRA, silicon) != "" {
			r.earlierRules[silicon], found = as, true
		}
	}
	if found {
		r.applyRules()
	}
}

// changingSilicon returns the physical devices that are still under earlier rules.
func (r *ruledDevices) changingSilicon() map[string]bool {
	changing := make(map[string]bool, len(r.earlierRules))
	for silicon := range r.earlierRules {
		changing[silicon] = true
	}
	return changing
}

// release puts physical devices under the present rules.
func (r *ruledDevices) release(silicon map[string]bool) {
	maps.DeleteFunc(r.earlierRules, func(name string, _ *rules.Rules) bool { return silicon[name] })
	r.applyRules()
}

// placeDevices decides the API of each device, and puts free physical devices under the present
// rules. The API server is asked only if the decision depends on its answer, with the physical
// devices that wait for it.
func (r *ruledDevices) placeDevices(before map[string]discovery.Mode, view *ledger.View, facts Facts, ask func(waiting map[string]bool) *Published) Placement {
	place := func() Placement {
		facts.Changing = r.changingSilicon()
		return PlaceDevices(before, r.snapshot.Devices, view, facts)
	}
	placement := place()
	if len(placement.NeedsPublished) > 0 {
		facts.Published = ask(placement.NeedsPublished)
		placement = place()
	}
	if len(placement.Free) > 0 {
		r.release(placement.Free)
		placement = place()
	}
	return placement
}

func bySilicon(s *rules.Snapshot) map[string][]rules.Offered {
	all := make(map[string][]rules.Offered)
	for _, d := range s.Devices {
		all[d.Silicon()] = append(all[d.Silicon()], d)
	}
	return all
}

// sameForm reports whether a snapshot has all devices of one physical device, with the same
// sharing. The devices may belong to different physical devices in the snapshot: the ledger judges
// entries by both the earlier and the present physical device.
func sameForm(before []rules.Offered, after *rules.Snapshot) bool {
	for i := range before {
		now, found := after.Lookup(before[i].Name)
		if !found || before[i].ShareForm() != now.ShareForm() {
			return false
		}
	}
	return true
}
