package exclusion

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
)

// Index finds the accounts that may concern a device. Thousands of shares of one device are found
// under the same terms, so the accounts of a term are a map.
type Index struct {
	byTerm      map[string]map[string]*Account // accounts by term (physical device, device, node or function) and by key
	ownTerms    map[string]bool                // terms whose accounts no copy of the index shares
	withoutTerm []*Account                     // accounts without a known physical device, which are checked for every device
}

// NewIndex returns an index without accounts.
func NewIndex() Index {
	return Index{byTerm: make(map[string]map[string]*Account), ownTerms: make(map[string]bool)}
}

// Copy returns an index that does not change any more. The copy and the original share their maps
// until the original changes.
func (x *Index) Copy() Index {
	clear(x.ownTerms)
	return Index{byTerm: maps.Clone(x.byTerm), withoutTerm: x.withoutTerm}
}

// writableTerm returns the accounts of a term as a map that no copy shares.
func (x *Index) writableTerm(term string) map[string]*Account {
	if !x.ownTerms[term] {
		x.ownTerms[term] = true
		x.byTerm[term] = maps.Clone(x.byTerm[term])
	}
	if x.byTerm[term] == nil {
		x.byTerm[term] = make(map[string]*Account)
	}
	return x.byTerm[term]
}

// Add enters an account.
func (x *Index) Add(a *Account) {
	if a.lacksSilicon() {
		x.withoutTerm = append(slices.Clone(x.withoutTerm), a)
		return
	}
	for _, term := range a.terms() {
		x.writableTerm(term)[a.Key] = a
	}
}

// Remove removes an account.
func (x *Index) Remove(a *Account) {
	if a.lacksSilicon() {
		x.withoutTerm = slices.DeleteFunc(slices.Clone(x.withoutTerm), func(other *Account) bool { return other == a })
		return
	}
	for _, term := range a.terms() {
		accounts := x.writableTerm(term)
		if accounts[a.Key] == a {
			delete(accounts, a.Key)
		}
		if len(accounts) == 0 {
			delete(x.byTerm, term)
			delete(x.ownTerms, term)
		}
	}
}

// lacksSilicon reports whether the physical device of an account is unknown, so that no term finds
// the account.
func (a *Account) lacksSilicon() bool {
	sealed, ok := a.Entry.(*allocation.Sealed)
	return ok && sealed.AnyDevice || slices.ContainsFunc(a.Holds, func(h allocation.Hold) bool { return h.Present && h.Silicon == "" })
}

// terms returns the terms under which an account is found.
func (a *Account) terms() []string {
	terms := make(map[string]bool)
	if e, ok := a.Entry.(*allocation.LeaseEntry); ok {
		for _, term := range leaseTerms(e) {
			terms[term] = true
		}
	}
	for i := range a.Holds {
		h := &a.Holds[i]
		terms[h.Device], terms[h.Silicon] = true, true
		for _, n := range h.Nodes {
			for _, term := range nodeTerms(&n) {
				terms[term] = true
			}
		}
	}
	delete(terms, "")
	return slices.Sorted(maps.Keys(terms))
}

// AccountsOf returns the accounts that have a device or a physical device with a name.
func (x *Index) AccountsOf(device string) map[string]*Account { return x.byTerm[device] }

// LeaseOn returns the name of the lease that covers a PCI function, "" if there is none.
func (x *Index) LeaseOn(function discovery.DeviceKey) string {
	for _, a := range x.byTerm[functionTerm(function)] {
		if e, ok := a.Entry.(*allocation.LeaseEntry); ok && e.CoversFunction(function) {
			return e.Name
		}
	}
	return ""
}

// candidateAccounts returns the accounts that may block a hold, in a fixed order. Accounts are
// found by the recorded physical device, and by the present parts of the wanted physical device.
func (x *Index) candidateAccounts(w *allocation.Hold, nodes []allocation.Node, q *Query) []*Account {
	terms := append([]string{w.Device, w.Silicon}, q.Stock.Parts(w.Silicon)...)
	for i := range nodes {
		terms = append(terms, nodeTerms(&nodes[i])...)
	}
	seen := make(map[*Account]bool)
	found := slices.Clone(x.withoutTerm)
	for _, term := range terms {
		for _, a := range x.byTerm[term] {
			if !seen[a] {
				seen[a] = true
				found = append(found, a)
			}
		}
	}
	found = slices.DeleteFunc(found, q.exemptsAccount)
	slices.SortFunc(found, func(a, b *Account) int { return cmp.Compare(a.Key, b.Key) })
	return found
}

// Query describes a query of the index: whether an owner may have the wanted devices.
type Query struct {
	API           discovery.Mode
	Owner         allocation.Owner
	OwnKey        string                 // key of the owner's entry, which does not block the owner
	OnlyAPI       discovery.Mode         // consider only entries of this API, those of both APIs if ""
	SameContainer *allocation.Grant      // a grant of the same container; see [allocation.Grant.With]
	Previous      allocation.Owner       // if set, the entry with key OwnKey is exempt only if it belongs to this owner
	Lease         *allocation.LeaseEntry // the lease that wants the devices; nil for a claim or a grant
	Wanted        []allocation.Hold
	Stock         Stock

	Ending bool // whether grants that are ending block too, by either API
}

// exemptsAccount reports whether an account does not block the query: the owner's own entries, and
// leases for changes on behalf of the owner. Two devices that only wait for their resets do not
// wait for each other. A device that is withheld after its consumer has ended is withheld from that
// consumer too, because the key may be that of an ID which another container gets next.
func (q *Query) exemptsAccount(a *Account) bool {
	e, leased := a.Entry.(*allocation.LeaseEntry)
	switch {
	case leased && (e == q.Lease || e.Idle && q.Previous != allocation.Owner{}):
		return true
	case q.OwnKey == "":
		return false
	case q.SameContainer != nil && a.Entry == allocation.Entry(q.SameContainer):
		return true
	case a.Key == q.OwnKey:
		return q.Previous == allocation.Owner{} || a.Entry.Owner() == q.Previous
	}
	return a.Key == allocation.SealedKey(q.OwnKey) || leased && e.Consumer == q.OwnKey && (q.Lease != nil || e.WithheldReason == "")
}

// FindBlocked returns the first conflict of a query, nil if the owner may have the devices. All
// rules of exclusion are applied here.
func (x *Index) FindBlocked(q Query) *Blocked {
	if b := x.blockedFunctions(&q); b != nil {
		return b
	}
	for i := range q.Wanted {
		if b := x.blockedHold(q, i); b != nil {
			return b
		}
	}
	return nil
}

// blockedFunctions returns the lease that already covers one of the functions of the wanted lease. A
// lease for the same consumer blocks too: it may be that of a delayed write. Only a nested lease,
// whose consumer is the other lease, may have the same function.
func (x *Index) blockedFunctions(q *Query) *Blocked {
	if q.Lease == nil {
		return nil
	}
	for _, function := range q.Lease.Functions {
		for _, a := range x.byTerm[functionTerm(function)] {
			if e, ok := a.Entry.(*allocation.LeaseEntry); ok && e.CoversFunction(function) && a.Key != q.OwnKey {
				return a.NewBlocked(q.Lease.ChangedDevice(), q.Lease.ChangedDevice(), a.OwnerText(allocation.Owner{}))
			}
		}
	}
	return nil
}

func (x *Index) blockedHold(q Query, i int) *Blocked {
	w := Complete(q.Wanted[i], q.Stock)
	if w.Open {
		return nil
	}
	nodes := NodesOf(w.Device, q.Stock)
	balance := newBalance(&w, q.Stock)
	for j := range q.Wanted {
		if j != i {
			other := Complete(q.Wanted[j], q.Stock)
			balance.add(&other) // the owner's other devices; a shortage shows when those of others are added
		}
	}
	for _, a := range x.candidateAccounts(&w, nodes, &q) {
		counts := a.blocksAPI(q.API) || q.Ending && a.State == allocation.Ending
		if !counts || q.OnlyAPI != "" && a.Entry.API() != q.OnlyAPI {
			continue
		}
		who := a.OwnerText(q.Owner)
		for _, h := range presentHolds(a.Holds, q.Stock) {
			if h.Open {
				continue
			}
			why := ""
			switch {
			case q.belongsToOther(a) && touchesHold(&h, &w), excludesHold(&h, &w):
				why = fmt.Sprintf("%s (device %s)", who, h.Device)
			case !touchesHold(&h, &w) && hasNode(&h, nodes) && !a.explainsNodes(&w, q.Stock):
				why = fmt.Sprintf("%s, which was given its nodes as those of device %s", who, h.Device)
			default:
				if short := balance.add(&h); short != "" {
					why = fmt.Sprintf("%s: with its device %s, %s", who, h.Device, short)
				}
			}
			if why != "" {
				b := a.NewBlocked(w.Device, h.Device, why)
				if g, ok := a.Entry.(*allocation.Grant); ok && g.Container == "" && h.Device != w.Device && sameGroup(&h, &w) {
					b.Starting = g
				}
				return b
			}
		}
		if sealed, ok := a.Entry.(*allocation.Sealed); ok && sealed.AnyDevice {
			return &Blocked{Device: w.Device, Owner: sealed.Owner(), OwnerText: sealed.OwnerText()}
		}
	}
	return nil
}

// sameGroup reports whether two devices are functions of one IOMMU group, which only one process
// can use.
func sameGroup(a, b *allocation.Hold) bool {
	_, one := a.Takes[discovery.GroupCounter]
	_, other := b.Takes[discovery.GroupCounter]
	return one && other && a.Silicon == b.Silicon
}

// belongsToOther reports whether an account belongs to the other API, which never has devices of
// the same physical device. Changes of the agent are judged by device, whatever API offers the
// device.
func (q *Query) belongsToOther(a *Account) bool {
	return q.Lease == nil && !a.IsChange() && a.Entry.API() != q.API
}

// explainsNodes reports whether the nodes of a grant may be those of the wanted device, because the
// owner has that device too. A grant records the nodes of all its devices together.
func (a *Account) explainsNodes(w *allocation.Hold, stock Stock) bool {
	return a.Entry.API() == discovery.ModeDevicePlugin && slices.ContainsFunc(a.Holds, func(h allocation.Hold) bool {
		h = Complete(h, stock)
		return touchesHold(&h, w)
	})
}

// leaseTerms returns the terms under which the functions of the lease are found.
func leaseTerms(e *allocation.LeaseEntry) (terms []string) {
	for _, function := range e.Functions {
		terms = append(terms, functionTerm(function))
	}
	return terms
}

// functionTerm returns the term for leases of a function's address; [allocation.LeaseEntry.CoversFunction]
// distinguishes successive functions with the same address.
func functionTerm(function discovery.DeviceKey) string { return "function " + function.Function }
