package exclusion

import (
	"fmt"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
)

// Account is an immutable pair of an entry and its state.
type Account struct {
	Key   string // key of the entry
	Entry allocation.Entry
	State allocation.State
	Holds []allocation.Hold

	// Only for an Uncertain claim: To is the state of the claim if its file was written, and Before
	// is the account of the claim otherwise.
	To     allocation.State
	Before *Account
}

// NewAccount returns the account of an entry.
func NewAccount(e allocation.Entry, state allocation.State) *Account {
	return &Account{Key: e.Key(), Entry: e, State: state, Holds: e.Holds()}
}

// blocksAPI reports whether the account blocks owners by an API.
func (a *Account) blocksAPI(by discovery.Mode) bool {
	switch {
	case a.State == allocation.Ended || a.State == allocation.None:
		return false
	case a.State == allocation.Ending && a.Entry.API() == discovery.ModeDevicePlugin:
		return by != discovery.ModeDevicePlugin
	}
	return true
}

// hasEnded reports whether the account's owner has ended or is ending.
func (a *Account) hasEnded() bool {
	e, leased := a.Entry.(*allocation.LeaseEntry)
	return leased && e.WithheldReason != "" || a.State == allocation.Ending
}

// OwnerText names the account's owner in a message for another owner. If the owner is the agent,
// OwnerText also names the overdue call.
func (a *Account) OwnerText(other allocation.Owner) string {
	who := a.Entry.Owner().NameFor(other)
	if late := a.overdueCall(); late != nil {
		who += fmt.Sprintf(": %v", late)
	}
	return who
}

// overdueCall returns an error with an overdue call of the agent on the devices, or nil.
func (a *Account) overdueCall() error {
	if e, ok := a.Entry.(*allocation.LeaseEntry); ok {
		return e.OverdueCall()
	}
	return nil
}

// NewBlocked returns a Blocked for a device whose owner is the account's.
func (a *Account) NewBlocked(device, has, why string) *Blocked {
	return &Blocked{Device: device, Owner: a.Entry.Owner(), OwnedDevice: has, Kind: a.blockedKind(), OwnerText: why}
}

func (a *Account) blockedKind() BlockedKind {
	switch {
	case a.hasEnded():
		return Reclaiming
	case !a.IsChange():
		return InUse
	case a.overdueCall() != nil:
		return Overdue
	}
	return Changing
}

// IsChange reports whether the account is a lease for a change by the agent.
func (a *Account) IsChange() bool {
	e, leased := a.Entry.(*allocation.LeaseEntry)
	return leased && e.WithheldReason == ""
}
