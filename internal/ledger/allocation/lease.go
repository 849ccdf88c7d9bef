package allocation

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"chandler.dev/discovery"
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

	// OnEnd is called when a call on the devices ends after the lease was released. It must not
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

// ChangedDevice names the changed device for log messages and errors.
func (c *Change) ChangedDevice() string {
	switch {
	case len(c.Functions) > 0:
		return c.Functions[0].Function
	case len(c.Devices) > 0:
		return c.Devices[0].Device
	}
	return c.Name
}

// LeaseEntry is the third kind of entry beside claims and grants. It withholds devices from consumers
// because the agent is changing the devices, or because their previous consumer has not released
// them. A lease has no file and ends with the process; its creator records in a
// journal what must survive.
type LeaseEntry struct {
	Change

	WithheldReason string         // reason to withhold the devices from the next consumer, "" if the agent is changing them
	Idle           bool           // the devices are withheld, and no process has them open any more
	Calls          *overdue.Calls // calls on the devices, nil if the agent is not changing the devices
}

var _ Entry = (*LeaseEntry)(nil)

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
func (e *LeaseEntry) API() discovery.Mode { return e.Change.API }

// Owner implements [Entry]. The Owner of a previous consumer has no UID, since its claim is gone.
func (e *LeaseEntry) Owner() Owner {
	if e.WithheldReason == "" {
		return Owner{}
	}
	o := e.Previous
	o.UID, o.WithheldReason = "", e.WithheldReason
	return o
}

// Holds implements [Entry].
func (e *LeaseEntry) Holds() []Hold { return e.Devices }

// Files implements [Entry].
func (e *LeaseEntry) Files() []discovery.HostFile { return nil }

// OverdueCall returns an error that names an overdue call, nil if there is none.
func (e *LeaseEntry) OverdueCall() error {
	if e.Calls == nil {
		return nil
	}
	return e.Calls.OverdueCall(e.Name)
}

// CoversFunction reports whether the lease covers a function.
func (e *LeaseEntry) CoversFunction(function discovery.DeviceKey) bool {
	return slices.ContainsFunc(e.Functions, function.MayEqual)
}
