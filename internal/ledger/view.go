package ledger

import (
	"maps"
	"slices"

	"chandler.dev/discovery"
)

// View is an immutable snapshot of the ledger.
type View struct {
	accounts     []*account // sorted by key
	index        index
	foreign      map[string]*Grant // allocations of other plugins, by key
	stock        Stock
	version      int
	unknownOwner string // reason why a container may have a device without a recorded owner, or ""
}

// View returns the present state of the ledger for a host with the stock. The stock may be nil if
// the caller only lists entries. The view of a closed ledger is empty.
func (l *Ledger) View(s Stock) *View {
	if !l.isOpen() {
		return &View{index: newIndex(), stock: s}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.view == nil || l.view.version != l.accounts.version {
		l.view = &View{
			accounts: l.accounts.sorted(),
			index:    l.accounts.index.copy(),
			foreign:  maps.Clone(l.listing.foreign),
			version:  l.accounts.version,
		}
	}
	v := *l.view
	v.unknownOwner, v.stock = l.unknownOwnerReason(), s
	return &v
}

// ViewOf returns a view with the given entries as allocations, for computing their consequences.
func ViewOf(s Stock, entries ...Entry) *View {
	v := &View{index: newIndex(), stock: s}
	accounts := make(map[string]*account)
	for _, e := range entries {
		a := newAccount(e, Allocated)
		accounts[e.Key()] = a
		v.index.add(a)
	}
	v.accounts = sortAccounts(accounts)
	return v
}

// SameAs reports whether two views have the same content.
func (v *View) SameAs(other *View) bool {
	return v == other || v != nil && other != nil && v.version != 0 && v.version == other.version && v.unknownOwner == other.unknownOwner && v.stock == other.stock
}

// BlockedBy returns the reason why an owner by an API cannot get the wanted devices, or nil. own is
// the key of the owner's present entry, or "".
func (v *View) BlockedBy(by discovery.Mode, own string, want []Hold) *Blocked {
	return v.index.findBlocked(query{api: by, ownKey: own, wanted: want, stock: v.stock})
}

// UnknownOwnerReason returns the reason why a container may have a device without a recorded owner,
// or "".
func (v *View) UnknownOwnerReason() string { return v.unknownOwner }

// Claims returns the prepared claims, and the claims in configuration.
func (v *View) Claims() []*Claim { return claimsOf(v.accounts) }

// claimsOf returns the claims of accounts, except claims of an earlier boot.
func claimsOf(accounts []*account) (claims []*Claim) {
	for _, a := range accounts {
		if c, ok := a.entry.(*Claim); ok && a.state != Ended {
			claims = append(claims, c)
		}
	}
	return claims
}

// EarlierSources returns the chosen devices of claims of an earlier boot that are not prepared again
// yet.
func (v *View) EarlierSources() map[string]bool {
	sources := make(map[string]bool)
	for _, a := range v.accounts {
		if c, ok := a.entry.(*Claim); ok && a.state == Ended {
			for i := range c.Results {
				if r := &c.Results[i]; r.IsChosen() {
					sources[r.Source] = true
				}
			}
		}
	}
	return sources
}

// SealedEntries returns the entries of the present boot with unreadable records.
func (v *View) SealedEntries() (sealed []*Sealed) {
	for _, a := range v.accounts {
		if s, ok := a.entry.(*Sealed); ok && a.state != Ended {
			sealed = append(sealed, s)
		}
	}
	return sealed
}

// Grants returns the allocations by device plugin IDs, of any plugin. Allocations released by the
// kubelet are left out.
func (v *View) Grants() (grants []*Grant) {
	for _, a := range v.accounts {
		if g, ok := a.entry.(*Grant); ok && a.state != Ending {
			grants = append(grants, g)
		}
	}
	return grants
}

// OwnGrants returns the grants of this agent, including adopted ones.
func (v *View) OwnGrants() []*Grant {
	return slices.DeleteFunc(v.Grants(), func(g *Grant) bool { return v.foreign[g.Key()] != nil })
}

// Owners returns the owners of this agent's allocations, including claims that have not ended and
// entries with unreadable records. ending are the owners of grants missing from PodResources, until
// the kubelet's release is final.
func (v *View) Owners() (owners, ending []Owner) {
	for _, a := range v.accounts {
		grant, isGrant := a.entry.(*Grant)
		_, isLease := a.entry.(*lease)
		switch {
		case a.state == Ended, isLease, isGrant && (a.state == Ending || v.foreign[a.entry.Key()] != nil):
		case isGrant && !grant.missingSince.IsZero():
			ending = append(ending, a.entry.Owner())
		default:
			owners = append(owners, a.entry.Owner())
		}
	}
	return owners, ending
}

// Has reports whether a device is allocated.
func (v *View) Has(device string) bool {
	for _, a := range v.index.byTerm[device] {
		if a.state != Ended && slices.ContainsFunc(a.holds, func(h Hold) bool { return h.Device == device }) {
			return true
		}
	}
	return false
}

// RenumberedNodes describes how the nodes of a grant's devices differ from the nodes given to its
// container, or returns "". Numbers are ignored: after a reboot the container is given the nodes
// with the same paths.
func (v *View) RenumberedNodes(g *Grant) string {
	given := slices.Clone(g.Nodes)
	for i := range given {
		given[i].Major, given[i].Minor = 0, 0
	}
	return RenumberedNodes(given, g.Devices, v.stock)
}

// OwnerOf returns the owner by api whose allocation blocks the other API from a physical device, or
// "". A device with unlimited sharing has no owner. While the kubelet has not reported the devices of
// containers, a container perhaps has each physical device.
func (v *View) OwnerOf(api discovery.Mode, silicon string) (who string) {
	who = v.KnownOwner(api, silicon)
	if who == "" && api == discovery.ModeDevicePlugin {
		return v.unknownOwner
	}
	return who
}

// KnownOwner is [View.OwnerOf] without the containers that perhaps have a physical device.
func (v *View) KnownOwner(api discovery.Mode, silicon string) (who string) {
	q := query{api: discovery.ModeDRA, onlyAPI: api, wanted: []Hold{{Device: silicon, Silicon: silicon, Whole: true}}, stock: v.stock}
	if api == discovery.ModeDRA {
		q.api = discovery.ModeDevicePlugin
	}
	if b := v.index.findBlocked(q); b != nil {
		return b.ownerText
	}
	return ""
}
