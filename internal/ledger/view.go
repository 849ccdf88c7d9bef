package ledger

import (
	"maps"
	"time"

	"chandler.dev/discovery"
)

// View is the ledger of one moment. It is never modified.
type View struct {
	accounts []*account // in the order of their keys
	index    index
	heard    bool // whether PodResources has named all pods, or need not be asked
	at       time.Time
}

// View returns the ledger as it is now.
func (l *Ledger) View() *View {
	l.mu.Lock()
	defer l.mu.Unlock()
	return &View{
		accounts: sorted(l.accounts),
		index:    index{of: maps.Clone(l.index.of), loose: l.index.loose},
		heard:    l.said.whole || !l.config.Listings,
		at:       time.Now(),
	}
}

// Heard reports whether it is known what containers have.
func (v *View) Heard() bool { return v.heard }

// Blocked says why an owner by an API cannot have what it wants, nil if it can.
// The key is that of an entry of the owner's own, which may be "".
func (v *View) Blocked(by discovery.Mode, own string, want []Hold, s Stock) *Blocked {
	return v.index.blocked(question{by: by, own: own, want: want, stock: s, now: v.at})
}

// Claims returns the claims that are prepared, or whose devices are being
// changed.
func (v *View) Claims() (claims []*Claim) {
	for _, a := range v.accounts {
		if c, ok := a.entry.(*Claim); ok && a.state != Past {
			claims = append(claims, c)
		}
	}
	return claims
}

// Grants returns what containers have by classic IDs, whatever plugin gave them.
// Those that have left the kubelet's books are not among them.
func (v *View) Grants() (grants []*Grant) {
	for _, a := range v.accounts {
		if g, ok := a.entry.(*Grant); ok && a.state != Ending {
			grants = append(grants, g)
		}
	}
	return grants
}

// Holder returns who has anything of a piece of silicon by an API, for a
// message. What is open is nobody's.
func (v *View) Holder(api discovery.Mode, silicon string, s Stock) (who string, held bool) {
	if api == discovery.ModeDevicePlugin && !v.heard {
		return unheard, true
	}
	for _, a := range v.index.concerned(&Hold{Device: silicon, Silicon: silicon}, nil, "") {
		if a.entry.API() != api || a.state == Past || a.state == Ending && !v.at.Before(a.until) && api == discovery.ModeDevicePlugin {
			continue
		}
		if sealed, ok := a.entry.(*Sealed); ok && sealed.all {
			return sealed.who(), true
		}
		for _, h := range a.holds {
			if h = complete(h, s); !h.Open && h.Silicon == silicon {
				return a.entry.Owner().String(), true
			}
		}
	}
	return "", false
}
