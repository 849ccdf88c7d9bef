package ledger

import (
	"fmt"
	"maps"
	"slices"

	"chandler.dev/discovery"
)

// account is an immutable pair of an entry and its state.
type account struct {
	key   string // key of the entry
	entry Entry
	state State
	holds []Hold

	// Only for an Uncertain claim: to is the state of the claim if its file was written, and before is
	// the account of the claim otherwise.
	to     State
	before *account
}

func newAccount(e Entry, state State) *account {
	return &account{key: e.Key(), entry: e, state: state, holds: e.Holds()}
}

// blocksAPI reports whether the account blocks owners by an API.
func (a *account) blocksAPI(by discovery.Mode) bool {
	switch {
	case a.state == Ended || a.state == None:
		return false
	case a.state == Ending && a.entry.API() == discovery.ModeDevicePlugin:
		return by != discovery.ModeDevicePlugin
	}
	return true
}

// hasEnded reports whether the account's owner has ended or is ending.
func (a *account) hasEnded() bool {
	e, leased := a.entry.(*lease)
	return leased && e.withheldReason != "" || a.state == Ending
}

// ownerText names the account's owner in a message for another owner. If the owner is the agent,
// ownerText also names the overdue call.
func (a *account) ownerText(other Owner) string {
	who := a.entry.Owner().before(other)
	if late := a.overdueCall(); late != nil {
		who += fmt.Sprintf(": %v", late)
	}
	return who
}

// overdueCall returns an error with an overdue call of the agent on the devices, or nil.
func (a *account) overdueCall() error {
	if e, ok := a.entry.(*lease); ok {
		return e.overdueCall()
	}
	return nil
}

// newBlocked returns a Blocked for a device whose owner is the account's.
func (a *account) newBlocked(device, has, why string) *Blocked {
	return &Blocked{Device: device, Owner: a.entry.Owner(), OwnedDevice: has, Reclaiming: a.hasEnded(), Changing: a.isChange(), overdue: a.overdueCall() != nil, ownerText: why}
}

// isChange reports whether the account is a lease for a change by the agent.
func (a *account) isChange() bool {
	e, leased := a.entry.(*lease)
	return leased && e.withheldReason == ""
}

func (a *account) has() bool { return a != nil && (a.state == Allocated || a.state == Configuring) }

// accounts are the accounts of a ledger. The caller of each method has the ledger's mutex.
type accounts struct {
	byKey      map[string]*account
	index      index
	version    int           // number of changes, from 1, because a view of no ledger has 0
	leaseEnded chan struct{} // closed when the next lease ends
	entryEnded chan struct{} // closed when an entry ends; nil if no caller waits
}

func newAccounts() accounts {
	return accounts{byKey: make(map[string]*account), index: newIndex(), version: 1, leaseEnded: make(chan struct{})}
}

// sorted returns the accounts sorted by key.
func (all *accounts) sorted() []*account { return sortAccounts(all.byKey) }

func sortAccounts(byKey map[string]*account) []*account {
	list := make([]*account, 0, len(byKey))
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		list = append(list, byKey[key])
	}
	return list
}

// put stores an account under its key.
func (all *accounts) put(a *account) {
	if before := all.byKey[a.key]; before != nil {
		all.index.remove(before)
	}
	all.byKey[a.key] = a
	all.index.add(a)
	all.version++
}

// drop removes the account of a key, and signals a possibly free device.
func (all *accounts) drop(key string) {
	a := all.byKey[key]
	if !all.take(key) {
		return
	}
	if _, leased := a.entry.(*lease); leased {
		close(all.leaseEnded)
		all.leaseEnded = make(chan struct{})
	}
	if !a.isChange() && all.entryEnded != nil {
		close(all.entryEnded)
		all.entryEnded = nil
	}
}

// take removes the account of a key, and reports whether there was an account.
func (all *accounts) take(key string) bool {
	a := all.byKey[key]
	if a == nil {
		return false
	}
	delete(all.byKey, key)
	all.index.remove(a)
	all.version++
	return true
}

// putBack restores the account of a key from before a reservation without visible effect. putBack
// does not signal a release: waiting callers would retry at once.
func (all *accounts) putBack(key string, before *account) {
	all.take(key)
	if before != nil {
		all.put(before)
	}
}

// restore sets the account of a key back to an earlier account.
func (all *accounts) restore(key string, before *account) {
	all.drop(key)
	if before != nil {
		all.put(before)
	}
}

// FreedSignal returns a channel. The ledger closes the channel when an entry ends and its devices
// may be allocated. The end of the agent's own changes does not close the channel: callers wait for
// the channel before such a change.
func (l *Ledger) FreedSignal() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.accounts.entryEnded == nil {
		l.accounts.entryEnded = make(chan struct{})
	}
	return l.accounts.entryEnded
}
