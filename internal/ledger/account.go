package ledger

import (
	"maps"
	"slices"

	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// newSealedAccount returns an account for a sealed entry.
func newSealedAccount(s *allocation.Sealed) *exclusion.Account {
	if s.EarlierBoot {
		return exclusion.NewAccount(s, allocation.Ended)
	}
	return exclusion.NewAccount(s, allocation.Allocated)
}

// isInUse reports whether the consumer of an account has its devices. The account may be nil.
func isInUse(a *exclusion.Account) bool {
	return a != nil && (a.State == allocation.Allocated || a.State == allocation.Configuring)
}

// accounts are the accounts of a ledger. The caller of each method has the ledger's mutex.
type accounts struct {
	byKey      map[string]*exclusion.Account
	index      exclusion.Index
	version    int           // number of changes, from 1, because a view of no ledger has 0
	leaseEnded chan struct{} // closed when the next lease ends
	changes    int           // number of ended changes of devices by the agent
	entryEnded chan struct{} // closed when an entry ends; nil if no caller waits
}

func newAccounts() accounts {
	return accounts{byKey: make(map[string]*exclusion.Account), index: exclusion.NewIndex(), version: 1, leaseEnded: make(chan struct{})}
}

// sorted returns the accounts sorted by key.
func (all *accounts) sorted() []*exclusion.Account { return sortAccounts(all.byKey) }

func sortAccounts(byKey map[string]*exclusion.Account) []*exclusion.Account {
	list := make([]*exclusion.Account, 0, len(byKey))
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		list = append(list, byKey[key])
	}
	return list
}

// put stores an account under its key.
func (all *accounts) put(a *exclusion.Account) {
	if before := all.byKey[a.Key]; before != nil {
		all.index.Remove(before)
	}
	all.byKey[a.Key] = a
	all.index.Add(a)
	all.version++
}

// drop removes the account of a key, and signals a possibly free device.
func (all *accounts) drop(key string) {
	a := all.byKey[key]
	if !all.take(key) {
		return
	}
	if _, leased := a.Entry.(*allocation.LeaseEntry); leased {
		close(all.leaseEnded)
		all.leaseEnded = make(chan struct{})
	}
	if a.IsChange() {
		all.changes++
	} else if all.entryEnded != nil {
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
	all.index.Remove(a)
	all.version++
	return true
}

// putBack restores the account of a key from before a reservation without visible effect. putBack
// does not signal a release: waiting callers would retry at once.
func (all *accounts) putBack(key string, before *exclusion.Account) {
	all.take(key)
	if before != nil {
		all.put(before)
	}
}

// restore sets the account of a key back to an earlier account.
func (all *accounts) restore(key string, before *exclusion.Account) {
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
