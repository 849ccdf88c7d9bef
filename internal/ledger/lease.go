package ledger

import (
	"context"
	"fmt"
	"slices"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/overdue"
)

// Leases are the changes of devices by the agent, and the devices that are withheld after the end of
// their consumer.
type Leases struct {
	*core

	closed bool // no new lease is possible; guarded by the mutex
}

// Lease is the permission to change devices until it is released. The agent writes to no PCI
// function without a lease.
type Lease struct {
	core  *core
	entry *allocation.LeaseEntry

	// The following fields are guarded by the ledger's mutex.
	running  int  // number of running calls of Do
	released bool // set by Release; the lease lasts until these calls have ended
}

// LeaseDevices reserves the devices and functions of a change, or returns the consumer or the other
// lease that has one of them. Consumers of both APIs are checked.
func (ls *Leases) LeaseDevices(c allocation.Change, s exclusion.Stock) (*Lease, *exclusion.Blocked) {
	e := &allocation.LeaseEntry{Change: c, Calls: &overdue.Calls{}}
	q := exclusion.Query{API: discovery.ModeDRA, OwnKey: c.Consumer, Previous: c.Previous, Lease: e, Wanted: e.Devices, Stock: s, Ending: true}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.closed {
		return nil, &exclusion.Blocked{Device: c.ChangedDevice(), OwnedDevice: c.ChangedDevice(), OwnerText: "the agent, which ends"}
	}
	if other := ls.accounts.byKey[e.Key()]; other != nil {
		return nil, other.NewBlocked(c.ChangedDevice(), c.ChangedDevice(), other.OwnerText(allocation.Owner{}))
	}
	if ls.accounts.byKey[c.Consumer] == nil {
		if b := ls.mayHave(q); b != nil {
			return nil, b
		}
	}
	if b := ls.accounts.index.FindBlocked(q); b != nil {
		return nil, b
	}
	ls.accounts.put(exclusion.NewAccount(e, allocation.Reserved))
	return &Lease{core: ls.core, entry: e}, nil
}

// AwaitLease returns a lease as [Leases.LeaseDevices] does, but waits for other leases to end,
// except for a lease with an overdue call. It calls stock before each attempt.
func (ls *Leases) AwaitLease(ctx context.Context, c allocation.Change, stock func() exclusion.Stock) (*Lease, error) {
	for {
		ls.mu.Lock()
		ended := ls.accounts.leaseEnded
		ls.mu.Unlock()
		x, blocked := ls.LeaseDevices(c, stock())
		if blocked == nil {
			return x, nil
		}
		if blocked.Kind != exclusion.Changing {
			return nil, blocked
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", blocked, ctx.Err())
		case <-ended:
		}
	}
}

// EndLeases refuses new leases and waits until the agent is changing no device, or until the
// context ends. It reports whether no change is left. While one is left, a write to the host may
// still continue.
func (ls *Leases) EndLeases(ctx context.Context) (ended bool) {
	for {
		ls.mu.Lock()
		ls.closed = true
		next, some := ls.accounts.leaseEnded, false
		for _, a := range ls.accounts.byKey {
			some = some || a.IsChange()
		}
		ls.mu.Unlock()
		if !some {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-next:
		}
	}
}

// EndedChanges returns the number of changes of devices that have ended. If the number is the same
// before a device is examined and after it is allocated, the agent has not changed the device in
// between.
func (ls *Leases) EndedChanges() int {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.accounts.changes
}

// LeaseOn returns the name of the lease that covers a PCI function, so that the agent may write to
// the function, "" if there is none.
func (ls *Leases) LeaseOn(function discovery.DeviceKey) (name string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.accounts.index.LeaseOn(function)
}

// Do calls do, which may block in the kernel without limit. After the limit, Do returns an error
// that wraps [overdue.Err]; the lease then lasts until the call has ended.
func (x *Lease) Do(limit time.Duration, what string, do func() error) error {
	x.core.mu.Lock()
	x.running++
	x.core.mu.Unlock()
	return x.entry.Calls.Do(limit, x.entry.Name, what, func() error {
		defer x.endCall() // not by the error: the call may report another overdue call
		return do()
	})
}

// OverdueCall returns an error that names an overdue call, nil if there is none.
func (x *Lease) OverdueCall() error { return x.entry.OverdueCall() }

// Release ends the lease once all calls have ended.
func (x *Lease) Release() {
	x.core.mu.Lock()
	defer x.core.mu.Unlock()
	x.released = true
	x.dropIfDone()
}

// endCall records the end of a call.
func (x *Lease) endCall() {
	x.core.mu.Lock()
	x.running--
	after := x.released
	x.dropIfDone()
	x.core.mu.Unlock()
	if after && x.entry.OnEnd != nil {
		x.entry.OnEnd()
	}
}

// dropIfDone ends the lease if it was released and no call is running. The caller has the ledger's
// mutex.
func (x *Lease) dropIfDone() {
	if key := x.entry.Key(); x.released && x.running == 0 && x.core.accounts.byKey[key] != nil && x.core.accounts.byKey[key].Entry == allocation.Entry(x.entry) {
		x.core.accounts.drop(key)
	}
}

// KeptDevice withholds a device from the next consumer after the previous consumer has ended. The
// creator records the device elsewhere, and calls Keep again before the ledger is opened.
type KeptDevice struct {
	Name     string           // unique name
	Consumer string           // key of the previous consumer's entry; a lease for that consumer is not blocked
	Previous allocation.Owner // the previous consumer
	Hold     allocation.Hold  // the hold of the previous consumer
	Reason   string           // why the device is kept: "process 47 (train) has /dev/nvidia0 open"
	Idle     bool             // no process has the device open any more, so it does not block the reset of another device
}

func (k *KeptDevice) asLease() *allocation.LeaseEntry {
	return &allocation.LeaseEntry{Change: allocation.Change{Name: k.Name, Consumer: k.Consumer, Previous: k.Previous, API: k.Previous.API, Devices: []allocation.Hold{k.Hold}}, WithheldReason: k.Reason, Idle: k.Idle}
}

// Owner returns the previous consumer, with the reason why the device is kept.
func (k *KeptDevice) Owner() allocation.Owner { return k.asLease().Owner() }

// KeepDevice withholds a device until [Leases.Release]. A later call with the same name replaces
// the reason.
func (ls *Leases) KeepDevice(k *KeptDevice) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.accounts.put(exclusion.NewAccount(k.asLease(), allocation.Reserved))
}

// Release ends the effect of [Leases.KeepDevice].
func (ls *Leases) Release(name string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.accounts.drop((&allocation.Change{Name: name}).Key())
}

// KeptReason returns why one of the devices is withheld after its consumer has ended, "" if none
// is.
func (v *View) KeptReason(devices ...string) string {
	for _, a := range v.accounts {
		if e, ok := a.Entry.(*allocation.LeaseEntry); ok && e.WithheldReason != "" && slices.Contains(devices, e.Devices[0].Device) {
			return e.Owner().String()
		}
	}
	return ""
}

// IsTaken reports whether another consumer has a kept device, the whole device that contains a kept
// partition, or a partition of a kept device. The entry with the given key is ignored if it belongs
// to the previous consumer, which is ending, even if its record is sealed.
func (ls *Leases) IsTaken(name, key string, had allocation.Owner) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	kept := ls.accounts.byKey[(&allocation.Change{Name: name}).Key()]
	if kept == nil {
		return false
	}
	wanted := slices.Clone(kept.Holds)
	for i := range wanted {
		wanted[i].Takes = nil // counters: consumers of other partitions do not have this one
	}
	q := exclusion.Query{API: had.API, OwnKey: key, Previous: had, Lease: kept.Entry.(*allocation.LeaseEntry), Wanted: wanted, Stock: &exclusion.Present{}}
	return ls.accounts.index.FindBlocked(q) != nil
}
