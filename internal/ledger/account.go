package ledger

import (
	"fmt"
	"maps"
	"slices"

	"chandler.dev/discovery"
)

// account is what the ledger knows of one entry. It is never modified.
type account struct {
	key   string // of the entry
	entry Entry
	state State
	holds []Hold

	// Of an Unsure claim: the state that it has if its file was written, and
	// the account that it has if not.
	to     State
	before *account
}

func newAccount(e Entry, state State) *account {
	return &account{key: e.Key(), entry: e, state: state, holds: e.Holds()}
}

// blocks reports whether the account keeps owners by an API out.
func (a *account) blocks(by discovery.Mode) bool {
	switch {
	case a.state == Past || a.state == None:
		return false
	case a.state == Ending && a.entry.API() == discovery.ModeDevicePlugin:
		return by != discovery.ModeDevicePlugin
	}
	return true
}

// passes reports whether the account is of an owner that has ended, or is ending.
func (a *account) passes() bool {
	e, leased := a.entry.(*lease)
	return leased && e.why != "" || a.state == Ending
}

// who names the account's owner for another, and the call that the agent waits for if it is the agent.
func (a *account) who(other Owner) string {
	who := a.entry.Owner().before(other)
	if late := a.late(); late != nil {
		who += fmt.Sprintf(": %v", late)
	}
	return who
}

// late returns an error that names an overdue call of the agent on the devices, nil if there is none.
func (a *account) late() error {
	if e, ok := a.entry.(*lease); ok {
		return e.late()
	}
	return nil
}

// blocking returns that the account blocks a device, since its owner has another.
func (a *account) blocking(device, has, why string) *Blocked {
	return &Blocked{Device: device, By: a.entry.Owner(), Has: has, Passing: a.passes(), Changing: a.changes(), late: a.late() != nil, why: why}
}

// changes reports whether the account is of a lease on what the agent changes.
func (a *account) changes() bool {
	e, leased := a.entry.(*lease)
	return leased && e.why == ""
}

func (a *account) has() bool { return a != nil && (a.state == Given || a.state == Configuring) }

// sorted returns the accounts in the order of their keys.
func sorted(accounts map[string]*account) []*account {
	list := make([]*account, 0, len(accounts))
	for _, key := range slices.Sorted(maps.Keys(accounts)) {
		list = append(list, accounts[key])
	}
	return list
}

func (l *Ledger) account(key string) *account {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.accounts[key]
}

// put makes an account the one of its key.
func (l *Ledger) put(a *account) {
	if before := l.accounts[a.key]; before != nil {
		l.index.remove(before)
	}
	l.accounts[a.key] = a
	l.index.add(a)
	l.version++
}

// drop forgets the account of a key, and says that something is free.
func (l *Ledger) drop(key string) {
	a := l.accounts[key]
	if !l.takeOut(key) {
		return
	}
	if _, leased := a.entry.(*lease); leased {
		close(l.leasesEnd)
		l.leasesEnd = make(chan struct{})
	}
	if !a.changes() && l.freed != nil {
		close(l.freed)
		l.freed = nil
	}
}

// takeOut forgets the account of a key, and reports whether there was one.
func (l *Ledger) takeOut(key string) bool {
	a := l.accounts[key]
	if a == nil {
		return false
	}
	delete(l.accounts, key)
	l.index.remove(a)
	l.version++
	return true
}

// putBack makes the account of a key what it was before a reservation that nobody has seen. Nothing is freed: whoever
// waits for that would try again at once.
func (l *Ledger) putBack(key string, before *account) {
	l.takeOut(key)
	if before != nil {
		l.put(before)
	}
}

// Freed returns what is closed when somebody's entry is no more, so that somebody else may have what it had. The
// agent's own changes do not count: whoever tries to begin one may wait for this.
func (l *Ledger) Freed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.freed == nil {
		l.freed = make(chan struct{})
	}
	return l.freed
}
