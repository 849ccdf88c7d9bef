package ledger

import (
	"maps"
	"slices"

	"chandler.dev/discovery"
)

// View is the ledger of one moment. It is never modified.
type View struct {
	accounts  []*account // in the order of their keys
	index     index
	strangers map[string]*Grant // by key, what other plugins gave
	stock     Stock
	version   int
	perhaps   string // why a container may have what nobody is known to have, "" if none may
}

// View returns the ledger as it is now, for a host that has the stock. The stock
// may be nil where only entries are listed. The view of a ledger that is not open
// shows nothing.
func (l *Ledger) View(s Stock) *View {
	if !l.isOpen() {
		return &View{index: newIndex(), stock: s}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.view == nil || l.view.version != l.version {
		l.view = &View{
			accounts:  sorted(l.accounts),
			index:     l.index.copy(),
			strangers: maps.Clone(l.said.strangers),
			version:   l.version,
		}
	}
	v := *l.view
	v.perhaps, v.stock = l.perhaps(), s
	return &v
}

// ViewOf returns a view of entries that are all given, for those who compute what
// follows from one.
func ViewOf(s Stock, entries ...Entry) *View {
	v := &View{index: newIndex(), stock: s}
	accounts := make(map[string]*account)
	for _, e := range entries {
		a := newAccount(e, Given)
		accounts[e.Key()] = a
		v.index.add(a)
	}
	v.accounts = sorted(accounts)
	return v
}

// Same reports whether two views show the same.
func (v *View) Same(other *View) bool {
	return v == other || v != nil && other != nil && v.version != 0 && v.version == other.version && v.perhaps == other.perhaps && v.stock == other.stock
}

// Blocked says why an owner by an API cannot have what it wants, nil if it can.
// The key is that of an entry of the owner's own, which may be "".
func (v *View) Blocked(by discovery.Mode, own string, want []Hold) *Blocked {
	return v.index.blocked(question{by: by, own: own, want: want, stock: v.stock})
}

// Perhaps says why a container may have what nobody is known to have, "" if none may.
func (v *View) Perhaps() string { return v.perhaps }

// Claims returns the claims that are prepared, or whose devices are being
// changed.
func (v *View) Claims() []*Claim { return claimsOf(v.accounts) }

// claimsOf returns the claims of accounts that are not of an earlier boot.
func claimsOf(accounts []*account) (claims []*Claim) {
	for _, a := range accounts {
		if c, ok := a.entry.(*Claim); ok && a.state != Past {
			claims = append(claims, c)
		}
	}
	return claims
}

// Sealed returns the entries of this boot whose records were set aside, since they are
// not understood.
func (v *View) Sealed() (sealed []*Sealed) {
	for _, a := range v.accounts {
		if s, ok := a.entry.(*Sealed); ok && a.state != Past {
			sealed = append(sealed, s)
		}
	}
	return sealed
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

// Ours returns the grants that were given here, or were adopted.
func (v *View) Ours() []*Grant {
	return slices.DeleteFunc(v.Grants(), func(g *Grant) bool { return v.strangers[g.Key()] != nil })
}

// Owners returns who has something that was given here, whose claim has not ended yet, or
// whose entry is not understood. Those are ending that PodResources does not name any more,
// and that have not left the kubelet's books for good.
func (v *View) Owners() (owners, ending []Owner) {
	for _, a := range v.accounts {
		grant, isGrant := a.entry.(*Grant)
		_, isLease := a.entry.(*lease)
		switch {
		case a.state == Past, isLease, isGrant && (a.state == Ending || v.strangers[a.entry.Key()] != nil):
		case isGrant && !grant.missing.IsZero():
			ending = append(ending, a.entry.Owner())
		default:
			owners = append(owners, a.entry.Owner())
		}
	}
	return owners, ending
}

// Has reports whether somebody has a device.
func (v *View) Has(device string) bool {
	for _, a := range v.index.of[device] {
		if a.state != Past && slices.ContainsFunc(a.holds, func(h Hold) bool { return h.Device == device }) {
			return true
		}
	}
	return false
}

// Renumbered says how the devices of a grant have other nodes than those that its
// container was given, "" if they have the same. Numbers do not count: after a
// reboot the container is given whatever bears the paths.
func (v *View) Renumbered(g *Grant) string {
	given := slices.Clone(g.Nodes)
	for i := range given {
		given[i].Major, given[i].Minor = 0, 0
	}
	return Renumbered(given, g.Devices, v.stock)
}

// OwnerOf returns who keeps the other API from silicon, because an owner by this
// API has any of it; "" if nobody does. An open device is nobody's.
func (v *View) OwnerOf(api discovery.Mode, silicon string) (who string) {
	q := question{by: discovery.ModeDRA, of: api, want: []Hold{{Device: silicon, Silicon: silicon, Whole: true}}, stock: v.stock}
	if api == discovery.ModeDRA {
		q.by = discovery.ModeDevicePlugin
	}
	if b := v.index.blocked(q); b != nil {
		return b.why
	}
	if api == discovery.ModeDevicePlugin {
		return v.perhaps
	}
	return ""
}
