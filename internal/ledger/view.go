package ledger

import (
	"maps"
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// View is an immutable snapshot of the ledger.
type View struct {
	accounts     []*exclusion.Account // sorted by key
	index        exclusion.Index
	foreign      map[string]*allocation.Grant // allocations of other plugins, by key
	stock        exclusion.Stock
	version      int
	unknownOwner string // reason why a container may have a device without a recorded owner, or ""
}

// View returns the present state of the ledger for a host with the stock. The stock may be nil if
// the caller only lists entries. The view of a closed ledger is empty.
func (l *Ledger) View(s exclusion.Stock) *View {
	if !l.isOpen() {
		return &View{index: exclusion.NewIndex(), stock: s}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.view == nil || l.view.version != l.accounts.version {
		l.view = &View{
			accounts: l.accounts.sorted(),
			index:    l.accounts.index.Copy(),
			foreign:  maps.Clone(l.listing.foreign),
			version:  l.accounts.version,
		}
	}
	v := *l.view
	v.unknownOwner, v.stock = l.unknownOwnerReason(), s
	return &v
}

// ViewOf returns a view with the given entries as allocations, for computing their consequences.
func ViewOf(s exclusion.Stock, entries ...allocation.Entry) *View {
	v := &View{index: exclusion.NewIndex(), stock: s}
	accounts := make(map[string]*exclusion.Account)
	for _, e := range entries {
		a := exclusion.NewAccount(e, allocation.Allocated)
		accounts[e.Key()] = a
		v.index.Add(a)
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
func (v *View) BlockedBy(by discovery.Mode, own string, want []allocation.Hold) *exclusion.Blocked {
	return v.index.FindBlocked(exclusion.Query{API: by, OwnKey: own, Wanted: want, Stock: v.stock})
}

// UnknownOwnerReason returns the reason why a container may have a device without a recorded owner,
// or "".
func (v *View) UnknownOwnerReason() string { return v.unknownOwner }

// Claims returns the prepared claims, and the claims in configuration.
func (v *View) Claims() []*allocation.Claim { return claimsOf(v.accounts) }

// claimsOf returns the claims of accounts, except claims of an earlier boot.
func claimsOf(accounts []*exclusion.Account) (claims []*allocation.Claim) {
	for _, a := range accounts {
		if c, ok := a.Entry.(*allocation.Claim); ok && a.State != allocation.Ended {
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
		if c, ok := a.Entry.(*allocation.Claim); ok && a.State == allocation.Ended {
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
func (v *View) SealedEntries() (sealed []*allocation.Sealed) {
	for _, a := range v.accounts {
		if s, ok := a.Entry.(*allocation.Sealed); ok && a.State != allocation.Ended {
			sealed = append(sealed, s)
		}
	}
	return sealed
}

// Grants returns the allocations by device plugin IDs, of any plugin. Allocations released by the
// kubelet are left out.
func (v *View) Grants() (grants []*allocation.Grant) {
	for _, a := range v.accounts {
		if g, ok := a.Entry.(*allocation.Grant); ok && a.State != allocation.Ending {
			grants = append(grants, g)
		}
	}
	return grants
}

// OwnGrants returns the grants of this agent, including adopted ones.
func (v *View) OwnGrants() []*allocation.Grant {
	return slices.DeleteFunc(v.Grants(), func(g *allocation.Grant) bool { return v.foreign[g.Key()] != nil })
}

// Owners returns the owners of this agent's allocations, including claims that have not ended and
// entries with unreadable records. ending are the owners of grants missing from PodResources, until
// the kubelet's release is final.
func (v *View) Owners() (owners, ending []allocation.Owner) {
	for _, a := range v.accounts {
		grant, isGrant := a.Entry.(*allocation.Grant)
		_, isLease := a.Entry.(*allocation.LeaseEntry)
		switch {
		case a.State == allocation.Ended, isLease, isGrant && (a.State == allocation.Ending || v.foreign[a.Entry.Key()] != nil):
		case isGrant && !grant.MissingSince.IsZero():
			ending = append(ending, a.Entry.Owner())
		default:
			owners = append(owners, a.Entry.Owner())
		}
	}
	return owners, ending
}

// Has reports whether a device is allocated.
func (v *View) Has(device string) bool {
	for _, a := range v.index.AccountsOf(device) {
		if a.State != allocation.Ended && slices.ContainsFunc(a.Holds, func(h allocation.Hold) bool { return h.Device == device }) {
			return true
		}
	}
	return false
}

// RenumberedNodes describes how the nodes of a grant's devices differ from the nodes given to its
// container, or returns "". Numbers are ignored: after a reboot the container is given the nodes
// with the same paths.
func (v *View) RenumberedNodes(g *allocation.Grant) string {
	given := slices.Clone(g.Nodes)
	for i := range given {
		given[i].Major, given[i].Minor = 0, 0
	}
	return exclusion.RenumberedNodes(given, g.Devices, v.stock)
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
	q := exclusion.Query{API: discovery.ModeDRA, OnlyAPI: api, Wanted: []allocation.Hold{{Device: silicon, Silicon: silicon, Whole: true}}, Stock: v.stock}
	if api == discovery.ModeDRA {
		q.API = discovery.ModeDevicePlugin
	}
	if b := v.index.FindBlocked(q); b != nil {
		return b.OwnerText
	}
	return ""
}
