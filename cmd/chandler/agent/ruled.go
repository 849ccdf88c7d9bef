package agent

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
)

// ruled is the devices of a host as the administrator wants them. When the rules
// exclude a device or share it in another way, its silicon stays as the earlier rules
// wanted it until it is released: somebody may have it by the names and amounts of
// before.
type ruled struct {
	rules    *rules.Rules
	earlier  map[string]*rules.Rules // by silicon that is still under earlier rules
	raw      *discovery.Snapshot
	snapshot *rules.Snapshot // what the rules make of raw, nil before there is one

	sought bool // excluded devices that claims have were sought
}

func newRuled(present *rules.Rules) *ruled {
	return &ruled{rules: present, earlier: make(map[string]*rules.Rules)}
}

// see takes over what a scan found.
func (r *ruled) see(raw *discovery.Snapshot) {
	r.raw = raw
	r.apply()
}

// apply makes the snapshot.
func (r *ruled) apply() {
	s := r.rules.Apply(r.raw)
	var kept []rules.Offered
	applied, names := make(map[*rules.Rules]bool), make(map[string]bool)
	for _, earlier := range r.earlier {
		if applied[earlier] {
			continue
		}
		applied[earlier] = true
		for _, d := range earlier.Apply(r.raw).Devices {
			if r.earlier[d.Silicon()] == earlier && !names[d.Name] {
				kept, names[d.Name] = append(kept, d), true
			}
		}
	}
	// Other rules may have other silicon: a resource joins the functions of an IOMMU group.
	s.Devices = slices.DeleteFunc(s.Devices, func(d rules.Offered) bool { return r.earlier[d.Silicon()] != nil || names[d.Name] })
	s.Devices = append(s.Devices, kept...)
	slices.SortFunc(s.Devices, func(a, b rules.Offered) int { return strings.Compare(a.Name, b.Name) })
	r.snapshot = s
}

// change puts other rules in force.
func (r *ruled) change(to *rules.Rules) {
	before := r.rules
	r.rules = to
	if r.raw == nil {
		return
	}
	if before.Unknown != "" { // nothing was offered in the form of those rules, so the agent begins as at a start
		r.sought = false
		r.apply()
		return
	}
	next := to.Apply(r.raw)
	for silicon, devices := range bySilicon(r.snapshot) {
		switch {
		case sameForm(devices, next):
			delete(r.earlier, silicon)
		case r.earlier[silicon] == nil:
			r.earlier[silicon] = before
		}
	}
	r.apply()
}

// keepExcluded keeps excluded devices that claims of an earlier process have, once
// it is known who has what. The claims are not told that their device is gone.
func (r *ruled) keepExcluded(view *ledger.View) {
	if r.sought {
		return
	}
	r.sought = true
	if len(r.rules.Exclude) == 0 {
		return
	}
	lenient := *r.rules
	lenient.Exclude = nil
	r.keep(&lenient, view)
}

// keepSplit keeps devices that claims have and that are left out because the rules give their silicon to two APIs. It
// may have become one piece since a claim got its device: a resource that another process read wants vfio for a function
// of the IOMMU group, or a function was plugged in.
func (r *ruled) keepSplit(view *ledger.View) {
	if !slices.ContainsFunc(r.snapshot.Problems, func(p discovery.Problem) bool { return errors.Is(p.Err, rules.ErrSplit) }) {
		return
	}
	apart := *r.rules
	apart.Resources = nil
	r.keep(&apart, view)
}

// keep keeps silicon as other rules want it that claims have, and that the present rules leave out or share otherwise.
func (r *ruled) keep(as *rules.Rules, view *ledger.View) {
	found := false
	for silicon, devices := range bySilicon(as.Apply(r.raw)) {
		if !sameForm(devices, r.snapshot) && view.OwnerOf(discovery.ModeDRA, silicon) != "" {
			r.earlier[silicon], found = as, true
		}
	}
	if found {
		r.apply()
	}
}

// changing returns the silicon that is still under earlier rules.
func (r *ruled) changing() map[string]bool {
	changing := make(map[string]bool, len(r.earlier))
	for silicon := range r.earlier {
		changing[silicon] = true
	}
	return changing
}

// release puts silicon under the present rules.
func (r *ruled) release(silicon map[string]bool) {
	maps.DeleteFunc(r.earlier, func(name string, _ *rules.Rules) bool { return silicon[name] })
	r.apply()
}

// place decides which API offers what, and puts silicon under the present rules that is
// free. The API server is asked only if it decides.
func (r *ruled) place(before map[string]discovery.Mode, view *ledger.View, facts Facts, ask func() *Published) Placement {
	place := func() Placement {
		facts.Changing = r.changing()
		return Place(before, r.snapshot.Devices, view, facts)
	}
	placement := place()
	if placement.Ask {
		facts.Published = ask()
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

// sameForm reports whether a snapshot has all devices of a piece of silicon, and shares them in the same way. Whether they
// are of one piece there, too, is not asked: the ledger judges entries by the silicon of before and by that of now.
func sameForm(before []rules.Offered, after *rules.Snapshot) bool {
	for i := range before {
		now, found := after.Lookup(before[i].Name)
		if !found || before[i].Form() != now.Form() {
			return false
		}
	}
	return true
}
