package agent

import (
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
	applied := make(map[*rules.Rules]bool)
	for _, earlier := range r.earlier {
		if applied[earlier] {
			continue
		}
		applied[earlier] = true
		under := func(d rules.Offered) bool { return r.earlier[d.Silicon()] == earlier }
		s.Devices = slices.DeleteFunc(s.Devices, under)
		for _, d := range earlier.Apply(r.raw).Devices {
			if under(d) {
				s.Devices = append(s.Devices, d)
			}
		}
	}
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
	next := bySilicon(to.Apply(r.raw))
	for silicon, devices := range bySilicon(r.snapshot) {
		switch {
		case sameForm(devices, next[silicon]):
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
	kept := bySilicon(r.snapshot)
	for silicon, devices := range bySilicon(lenient.Apply(r.raw)) {
		if !sameForm(devices, kept[silicon]) && view.OwnerOf(discovery.ModeDRA, silicon) != "" {
			r.earlier[silicon] = &lenient
		}
	}
	r.apply()
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

// sameForm reports whether two descriptions of silicon have all devices of the first,
// and share these in the same way.
func sameForm(before, after []rules.Offered) bool {
	for _, a := range before {
		i := slices.IndexFunc(after, func(b rules.Offered) bool { return b.Name == a.Name })
		if i < 0 || a.Form() != after[i].Form() {
			return false
		}
	}
	return true
}
