package ledger

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/overdue"
)

// Change describes a lease: the devices that the agent is about to change, and the consumer.
type Change struct {
	Name     string         // name of the lease; unique among all leases, such as the name of a device or a unit
	Consumer string         // key of the claim or lease that needs the change and does not block it; optional
	Previous Owner          // if set, the entry with key Consumer blocks the change unless it belongs to this owner
	API      discovery.Mode // the API that offers the devices
	Devices  []Hold         // the holds that no consumer may have meanwhile; see [DeviceHold] and [SiliconHold]

	// Functions are the PCI functions to be written, by [discovery.FunctionKey]. Each function has
	// at most one lease at a time. After the kernel has registered a function again, an earlier
	// lease does not cover it.
	Functions []discovery.DeviceKey

	// OnEnd is called when a call of [Lease.Do] ends after the lease was released. It must not
	// block. Optional.
	OnEnd func()
}

// DeviceHold returns the hold of a device alone: other consumers may have parts of the same
// physical device that do not compete with the device. silicon names the physical device of the
// last description, "" for the device itself.
func DeviceHold(name, silicon string) Hold {
	return Hold{Device: name, Silicon: cmp.Or(silicon, name), Present: true}
}

// SiliconHold returns the hold of a whole physical device.
func SiliconHold(name string) Hold { return Hold{Device: name, Silicon: name, Whole: true} }

// subject names the changed device for log messages and errors.
func (c *Change) subject() string {
	switch {
	case len(c.Functions) > 0:
		return c.Functions[0].Function
	case len(c.Devices) > 0:
		return c.Devices[0].Device
	}
	return c.Name
}

// HoldsOn returns the holds of all devices on PCI functions. A function without a device in s, such
// as one whose device was just excluded, has the hold of the device with the name of the function: a
// container may have got it before.
func HoldsOn(s Stock, functions ...string) (holds []Hold) {
	known := make(map[string]bool)
	for _, name := range s.Names() {
		d, _ := s.Device(name)
		on := slices.IndexFunc(functions, func(function string) bool { return d.Source == function || strings.HasPrefix(d.Source, function+"/") })
		if on >= 0 {
			known[functions[on]] = true
			holds = append(holds, DeviceHold(d.Name, d.Silicon()))
		}
	}
	for _, function := range functions {
		if !known[function] {
			holds = append(holds, DeviceHold(discovery.DeviceName(sysfs.At(nil, function)), ""))
		}
	}
	return holds
}

// lease is the third kind of entry beside claims and grants. It withholds devices from consumers
// because the agent is changing the devices, or because their previous consumer has not released
// them ([KeptDevice]). A lease has no file and ends with the process; its creator records in a
// journal what must survive.
type lease struct {
	Change

	withheldReason string         // reason to withhold the devices from the next consumer, "" if the agent is changing them
	idle           bool           // the devices are withheld, and no process has them open any more
	calls          *overdue.Calls // calls of [Lease.Do], nil if the agent is not changing the devices
}

var _ Entry = (*lease)(nil)

// Key returns the key of the lease; a nested change names it as its consumer. The name may contain
// the address of a function, which the kernel may give to another function, so the key also
// contains the inodes.
func (c *Change) Key() string {
	words := []string{c.Name}
	for _, function := range c.Functions {
		words = append(words, strconv.FormatUint(function.Inode, 10))
	}
	return strings.Join(append(words, "leased"), " ")
}

// API implements [Entry].
func (e *lease) API() discovery.Mode { return e.Change.API }

// Owner implements [Entry]. The Owner of a previous consumer has no UID, since its claim is gone.
func (e *lease) Owner() Owner {
	if e.withheldReason == "" {
		return Owner{}
	}
	o := e.Previous
	o.UID, o.withheldReason = "", e.withheldReason
	return o
}

// Holds implements [Entry].
func (e *lease) Holds() []Hold { return e.Devices }

// Files implements [Entry].
func (e *lease) Files() []discovery.HostFile { return nil }

// overdueCall returns an error that names an overdue call, nil if there is none.
func (e *lease) overdueCall() error {
	if e.calls == nil {
		return nil
	}
	return e.calls.OverdueCall(e.Name)
}

// terms returns the terms under which the functions of the lease are found.
func (e *lease) terms() (terms []string) {
	for _, function := range e.Functions {
		terms = append(terms, functionTerm(function))
	}
	return terms
}

// has reports whether the lease covers a function.
func (e *lease) has(function discovery.DeviceKey) bool {
	return slices.ContainsFunc(e.Functions, function.MayEqual)
}

// functionTerm returns the term for leases of a function's address; [lease.has] distinguishes
// successive functions with the same address.
func functionTerm(function discovery.DeviceKey) string { return "function " + function.Function }

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
	entry *lease

	// The following fields are guarded by the ledger's mutex.
	running  int  // number of running calls of Do
	released bool // set by Release; the lease lasts until these calls have ended
}

// LeaseDevices reserves the devices and functions of a change, or returns the consumer or the other
// lease that has one of them. Consumers of both APIs are checked.
func (ls *Leases) LeaseDevices(c Change, s Stock) (*Lease, *Blocked) {
	e := &lease{Change: c, calls: &overdue.Calls{}}
	q := query{api: discovery.ModeDRA, ownKey: c.Consumer, previous: c.Previous, lease: e, wanted: e.Devices, stock: s, ending: true}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.closed {
		return nil, &Blocked{Device: c.subject(), OwnedDevice: c.subject(), ownerText: "the agent, which ends"}
	}
	if other := ls.accounts.byKey[e.Key()]; other != nil {
		return nil, other.newBlocked(c.subject(), c.subject(), other.ownerText(Owner{}))
	}
	if ls.accounts.byKey[c.Consumer] == nil {
		if b := ls.mayHave(q); b != nil {
			return nil, b
		}
	}
	if b := ls.accounts.index.findBlocked(q); b != nil {
		return nil, b
	}
	ls.accounts.put(newAccount(e, Reserved))
	return &Lease{core: ls.core, entry: e}, nil
}

// AwaitLease returns a lease as [Leases.LeaseDevices] does, but waits for other leases to end,
// except for a lease with an overdue call. It calls stock before each attempt.
func (ls *Leases) AwaitLease(ctx context.Context, c Change, stock func() Stock) (*Lease, error) {
	for {
		ls.mu.Lock()
		ended := ls.accounts.leaseEnded
		ls.mu.Unlock()
		x, blocked := ls.LeaseDevices(c, stock())
		if blocked == nil {
			return x, nil
		}
		if !blocked.Changing || blocked.overdue {
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
			some = some || a.isChange()
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

// LeaseOn returns the name of the lease that covers a PCI function, so that the agent may write to
// the function, "" if there is none.
func (ls *Leases) LeaseOn(function discovery.DeviceKey) (name string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, a := range ls.accounts.index.byTerm[functionTerm(function)] {
		if e, ok := a.entry.(*lease); ok && e.has(function) {
			return e.Name
		}
	}
	return ""
}

// Do calls do, which may block in the kernel without limit. After the limit, Do returns an error
// that wraps [overdue.Err]; the lease then lasts until the call has ended.
func (x *Lease) Do(limit time.Duration, what string, do func() error) error {
	x.core.mu.Lock()
	x.running++
	x.core.mu.Unlock()
	return x.entry.calls.Do(limit, x.entry.Name, what, func() error {
		defer x.endCall() // not by the error: the call may report another overdue call
		return do()
	})
}

// OverdueCall returns an error that names an overdue call, nil if there is none.
func (x *Lease) OverdueCall() error { return x.entry.overdueCall() }

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
	if key := x.entry.Key(); x.released && x.running == 0 && x.core.accounts.byKey[key] != nil && x.core.accounts.byKey[key].entry == Entry(x.entry) {
		x.core.accounts.drop(key)
	}
}

// KeptDevice withholds a device from the next consumer after the previous consumer has ended. The
// creator records the device elsewhere, and calls Keep again before the ledger is opened.
type KeptDevice struct {
	Name     string // unique name
	Consumer string // key of the previous consumer's entry; a lease for that consumer is not blocked
	Previous Owner  // the previous consumer
	Hold     Hold   // the hold of the previous consumer
	Reason   string // why the device is kept: "process 47 (train) has /dev/nvidia0 open"
	Idle     bool   // no process has the device open any more, so it does not block the reset of another device
}

func (k *KeptDevice) asLease() *lease {
	return &lease{Change: Change{Name: k.Name, Consumer: k.Consumer, Previous: k.Previous, API: k.Previous.API, Devices: []Hold{k.Hold}}, withheldReason: k.Reason, idle: k.Idle}
}

// Owner returns the previous consumer, with the reason why the device is kept.
func (k *KeptDevice) Owner() Owner { return k.asLease().Owner() }

// KeepDevice withholds a device until [Leases.Release]. A later call with the same name replaces
// the reason.
func (ls *Leases) KeepDevice(k *KeptDevice) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.accounts.put(newAccount(k.asLease(), Reserved))
}

// Release ends the effect of [Leases.KeepDevice].
func (ls *Leases) Release(name string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.accounts.drop((&Change{Name: name}).Key())
}

// KeptReason returns why one of the devices is withheld after its consumer has ended, "" if none
// is.
func (v *View) KeptReason(devices ...string) string {
	for _, a := range v.accounts {
		if e, ok := a.entry.(*lease); ok && e.withheldReason != "" && slices.Contains(devices, e.Devices[0].Device) {
			return e.Owner().String()
		}
	}
	return ""
}

// IsTaken reports whether another consumer has a kept device, the whole device that contains a kept
// partition, or a partition of a kept device. The entry with the given key is ignored if it belongs to
// the previous consumer, which is ending, even if its record is sealed.
func (ls *Leases) IsTaken(name, key string, had Owner) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	kept := ls.accounts.byKey[(&Change{Name: name}).Key()]
	if kept == nil {
		return false
	}
	wanted := slices.Clone(kept.holds)
	for i := range wanted {
		wanted[i].Takes = nil // counters: consumers of other partitions do not have this one
	}
	q := query{api: had.API, ownKey: key, previous: had, lease: kept.entry.(*lease), wanted: wanted, stock: &Present{}}
	return ls.accounts.index.findBlocked(q) != nil
}
