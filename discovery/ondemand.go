package discovery

import (
	"context"
	"errors"
	"fmt"

	"chandler.dev/discovery/sysfs"
)

// Creation describes how to create a missing device on demand: a virtual function, or a partition.
// Families describe such devices if the administrator allows on-demand creation, in [Host], and
// only devices that can be created at that moment.
//
// A missing device has the name, the Silicon and the Takes of the future device, and the attributes
// that are known in advance. It has no nodes, and is healthy if it can be created. Once the device
// exists, the family describes it like any other device, without a Creation. No component needs to
// remember the difference.
//
// The agent creates a device by [Family.Create] for a claim, or for a resource of the device plugin
// API in the administrator's configuration. When all devices of the Unit have been unused for a
// while, the agent removes the unit by [Family.Remove]. The agent removes only units that an agent
// created.
type Creation struct {
	// Unit names the devices that are created in one step, and removed in one: all virtual
	// functions of a physical function, or a single partition. It is a DNS label, and unique on
	// the host.
	Unit string `json:"unit"`

	// Of is the kernel's directory of the physical function or device, as in [Device.Source].
	Of string `json:"of"`

	// How is the data that the family needs to create the unit and to remove it. The family
	// chooses the keys. How is recorded before the unit is created, so that a later agent can
	// remove the unit.
	How map[string]string `json:"how,omitempty"`
}

// Tools are the functions that the work of [Family.Create] and [Family.Remove] changes the host
// with. Each returns an error if the agent has no permission to change the host.
type Tools struct {
	// Write writes an attribute, by its name in fs.FS. It returns an error if the kernel blocks
	// the write for too long.
	Write func(name, value string) error

	// CheckBusy returns why PCI functions cannot be changed, nil if no process and no part of
	// the host uses one of them. The error begins with the name of the function. One call scans
	// the open files of all processes once, so callers should pass all functions together. With
	// keep the functions keep their drivers, and an interface that is up is not a use.
	CheckBusy func(keep bool, functions ...sysfs.Device) error

	// AmendRecord adds the result of a creation or a removal to the recorded [Creation.How] of
	// a unit. Without a record it does nothing.
	AmendRecord func(unit string, how map[string]string) error

	// RemoveRecord removes the record of a unit when nothing is left to remove, because another
	// program created the present devices or the creation failed.
	RemoveRecord func(unit string) error

	// ChangePartition runs the family's [Program] that has ChangeArgs once, and returns its
	// output.
	ChangePartition func(ctx context.Context, c PartitionChange) ([]byte, error)
}

// PartitionChange is the creation or the removal of a partition of a PCI function by a [Program].
type PartitionChange struct {
	Function string // the address of the PCI function: "0000:1b:00.0"
	Place    string // the place of the partition, in the form of the program: "1g.10gb@4"
	Remove   bool   // removes the partition; otherwise, it is created
	UUID     string // removes the partition only if this is its UUID; "" removes any
	HasBegun bool   // an agent has started the same change before
}

// CanCreate reports whether the family can create devices on demand.
func (f *Family) CanCreate() bool { return f.Create != nil && f.Remove != nil }

// HomeDirectory returns the kernel's directory without which the device cannot exist.
func (d *Device) HomeDirectory() string {
	if d.Creation != nil {
		return d.Creation.Of
	}
	return d.Source
}

// validate returns an error for an invalid description of a missing device.
func (m *Creation) validate(d *Device) error {
	switch {
	case m == nil:
		return nil
	case !plainLabel(m.Unit):
		return fmt.Errorf("it is made in unit %q, which is no DNS label", m.Unit)
	case m.Of == "":
		return errors.New("it is made of nothing")
	case len(d.Edits.DeviceNodes) > 0:
		return errors.New("it has nodes, and is not made yet")
	}
	return nil
}
