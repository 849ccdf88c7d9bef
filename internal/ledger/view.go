package ledger

import (
	"maps"
	"slices"

	"chandler.dev/discovery"
)

// View is an immutable snapshot of the ledger.
type View struct {
	accounts  []*account // sorted by key
	index     index
	strangers map[string]*Grant // allocations of other plugins, by key
	stock     Stock
	version   int
	perhaps   string // reason why a container may have a device without a recorded owner, or ""
}

// View returns the present state of the ledger for a host with the stock. The stock may be nil if the
// caller only lists entries. The view of a closed ledger is empty.
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

// ViewOf returns a view with the given entries as allocations, for computing their consequences.
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

// Same reports whether two views have the same content.
func (v *View) Same(other *View) bool {
	return v == other || v != nil && other != nil && v.version != 0 && v.version == other.version && v.perhaps == other.perhaps && v.stock == other.stock
}

// Blocked returns the reason why an owner by an API cannot get the wanted devices, or nil. own is the
// key of the owner's present entry, or "".
func (v *View) Blocked(by discovery.Mode, own string, want []Hold) *Blocked {
	return v.index.blocked(question{by: by, own: own, want: want, stock: v.stock})
}

// Perhaps returns the reason why a container may have a device without a recorded owner, or "".
func (v *View) Perhaps() string { return v.perhaps }

// Claims returns the prepared claims, and the claims in configuration.
func (v *View) Claims() []*Claim { return claimsOf(v.accounts) }

// claimsOf returns the claims of accounts, except claims of an earlier boot.
func claimsOf(accounts []*account) (claims []*Claim) {
	for _, a := range accounts {
		if c, ok := a.entry.(*Claim); ok && a.state != Past {
			claims = append(claims, c)
		}
	}
	return claims
}

// Sealed returns the entries of the present boot with unreadable records.
func (v *View) Sealed() (sealed []*Sealed) {
	for _, a := range v.accounts {
		if s, ok := a.entry.(*Sealed); ok && a.state != Past {
			sealed = append(sealed, s)
		}
	}
	return sealed
}

// Grants returns the allocations by device plugin IDs, of any plugin. Allocations released by the kubelet
// are left out.
func (v *View) Grants() (grants []*Grant) {
	for _, a := range v.accounts {
		if g, ok := a.entry.(*Grant); ok && a.state != Ending {
			grants = append(grants, g)
		}
	}
	return grants
}

// Ours returns the grants of this agent, including adopted ones.
func (v *View) Ours() []*Grant {
	return slices.DeleteFunc(v.Grants(), func(g *Grant) bool { return v.strangers[g.Key()] != nil })
}

// Owners returns the owners of this agent's allocations, including claims that have not ended and
// entries with unreadable records. ending are the owners of grants missing from PodResources, until
// the kubelet's release is final.
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

// Has reports whether a device is allocated.
func (v *View) Has(device string) bool {
	for _, a := range v.index.of[device] {
		if a.state != Past && slices.ContainsFunc(a.holds, func(h Hold) bool { return h.Device == device }) {
			return true
		}
	}
	return false
}

// Renumbered describes how the nodes of a grant's devices differ from the nodes given to its
// container, or returns "". Numbers are ignored: after a reboot the container is given the nodes with
// the same paths.
func (v *View) Renumbered(g *Grant) string {
	given := slices.Clone(g.Nodes)
	for i := range given {
		given[i].Major, given[i].Minor = 0, 0
	}
	return Renumbered(given, g.Devices, v.stock)
}

// OwnerOf returns the owner by api whose allocation blocks the other API from a physical device, or
// "". A device with unlimited sharing has no owner.
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
