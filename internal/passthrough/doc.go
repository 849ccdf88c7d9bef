// Package passthrough implements VFIO passthrough: it binds PCI functions to a vfio driver for
// consumers, and returns the functions to their previous drivers. The package records the previous
// state of a function before the first change. A new agent continues from any state left by a
// killed agent. The package has no vendor-specific code and no dependency on Kubernetes. The ledger
// decides which consumer gets a device.
//
// # Configuration and physical devices
//
// DriverConfig.passthrough allows the agent to bind PCI functions to a vfio driver for consumers. A
// scan marks these functions (discovery.Device.Passthrough). The functions of an IOMMU group become
// one physical device as soon as one of them is bound to a vfio driver, or a resource requests
// passthrough. The functions remain separate devices with their names. A lease on all functions of
// the group precedes the first write, so a claim that has one of the functions excludes the whole
// group from passthrough, whatever physical device the claim recorded.
//
// # From the request to the return
//
// [Manager] wraps a [discovery.Configurer], so a claim is Configuring while its device changes
// drivers. Before the first write, the journal contains one record of the whole unit, which is an
// IOMMU group, or a function without a group. The record contains, for each function, its driver,
// its driver_override, and the description of the device. While that record exists,
//
//   - snapshots contain the device as described in the record ([Manager.DescribeDevices]), with its
//     nodes and health under vfio. So rules, slices and settled states do not follow the change of
//     drivers, and no other family describes the function a second time;
//   - only consumers with a request for vfio can have the device, and no further changes are
//     needed.
//
// The agent returns a device (undoLoop of package changes) when the ledger grants a lease on all
// functions of the unit and no resource of the device plugin API requests passthrough. So the end
// of a claim does not wait for a driver, and the physical device cannot be allocated until its
// driver is back. The record is removed last. Each step reads the state of the kernel first, so a
// new agent continues from any step, in either direction. A record of another boot is void.
//
// A write may hang in the kernel. After 20 s the agent no longer waits for the write, and does
// nothing else to that function until the write ends.
package passthrough
