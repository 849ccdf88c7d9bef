// Package ondemand creates devices on demand, by the functions of their families, and removes them
// after their last consumer. The package records a unit before the unit is created. A new agent
// continues from any state left by a killed agent. The package has no vendor-specific code and no
// dependency on Kubernetes. The ledger decides which consumer has a device. The caller decides how
// long an unused device stays.
//
// # Devices that do not exist yet
//
// With the administrator's permission, a family may describe devices before they exist
// (discovery.Device.Creation): with their future names, Silicon and Takes, and without nodes.
// Slices contain them like any other device. After the creation, the family describes them like any
// other device, without a Creation. So there is no mapping of names, and no state about former
// names.
//
// # From the request to the removal
//
// [Manager] wraps a [discovery.Configurer], before package passthrough does. The work for a device
// with a Creation is the family's Create, for the whole Unit, the devices created in one step. Then
// the work waits until the device is in the view that both APIs use. Meanwhile a claim is
// Configuring. The device plugin API allocates only existing devices, so the agent creates the
// devices of entries of "resources" in advance (configurator of package agent). While a unit
// changes, snapshots contain its devices either healthy or not created, never in between
// ([Manager.DescribeDevices]).
//
// The unit is recorded before it is created. The agent removes the recorded devices (undoLoop of
// package changes) by Remove, when the ledger grants a lease on every device of the unit, no resource
// of the device plugin API lists a device of the unit, and no consumer has had a device of the unit
// for a while. The lease lasts until the devices are absent from scans. The record is removed last.
// A record of another boot is void.
//
// Create and Remove read the state of the kernel first, and return work that changes the host with
// the given Tools. So both continue from any step and can be tested as data, and this package
// handles hanging writes.
//
// Virtual functions (UncreatedFunctions, MakeVirtual and UnmakeVirtual of package pci)
// are available to any family: their addresses follow from sriov_offset and sriov_stride. A
// physical function that is offered itself takes the whole physical device, as beside existing
// virtual functions.
package ondemand
