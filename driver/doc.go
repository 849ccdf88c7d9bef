// Package driver implements Dynamic Resource Allocation: it publishes the snapshot of a host's
// devices in ResourceSlices, prepares and unprepares claims for the kubelet, and reports device
// health to the kubelet. The package contains no vendor-specific code. Of the host it reads only
// the device nodes and network interfaces that it gives to containers.
//
// # From the call to the CDI spec
//
// A call begins in calls.go, and prepare.go has the steps for one claim in their order. The steps are
// in devices.go (the devices of the claim), requests.go (parameters, programs and edits of each
// request), configure.go (work on devices) and verify.go (whether the devices are still the allocated
// ones). The ledger records the claim, and writes the CDI spec last.
//
// # Publishing
//
// Package publish writes the slices. The driver gives it the input: the snapshot, and the claims,
// since slices depend on them. A device that a claim has stays in the slices, with the counters that
// it consumes, after the device is gone, also on a server without taints. If the consumed counters
// are unknown, the rest of the physical device is omitted until the claim has ended. If consumers
// have a device under names that would no longer be published, because the form of the device has
// changed, the device is omitted until these consumers end.
//
// # Attributes with several values
//
// Some attributes have several values by nature. They are also in Device.Lists: linkedTo,
// rdmaDevice, the PCIe roots of a device of several functions, and as numaNode the device's own
// node and the other nodes of its socket that are equally near. A device with one value has no
// list. From Kubernetes 1.37 on, this selector serves both forms, and matchAttribute accepts both
// and requires a common value:
//
//	device.attributes["resource.kubernetes.io"].numaNode.includes(0)
//
// Metadata files contain only strings and numbers, so their readers do not depend on the features
// of the API server.
//
// # Replaced devices
//
// A claim is refused if its device was replaced after the allocation. When the driver notices the
// replacement, it reads the claims of the node's pods, and withholds the new device meanwhile. The
// driver cannot recognize an allocation that the scheduler decided before the replacement and stored
// later, up to 25 minutes in the worst case, and prepares the claim with the new device. No object
// has the time of the decision or the generation of the pool that it was based on: the scheduler
// sets the allocation's timestamp when it stores the allocation (bindClaim in
// pkg/scheduler/framework/plugins/dynamicresources/dynamicresources.go, 1.37), the results have only
// the names of pool and device (DeviceRequestAllocationResult in k8s.io/api/resource/v1, 0.37), and a
// nomination for the node has no time and is not unique to binding cycles, since preemption sets it too.
//
// # Pools
//
// A node has two pools (discovery.PoolName). A device that a claim has stays in the pool that the claim
// names, since the scheduler would take the device in the other pool for a free one. A free device
// moves to another pool if a new version of the driver assigns its kind to that pool. A claim that was
// allocated before the move and is prepared later has the same device as a claim allocated after the
// move, if there is one. Prepare refuses the later of the two until the first one ends.
//
// # Binding conditions
//
// No device has binding conditions. A driver that sets them must watch all claims that are
// allocated and not yet bound, so the agent of each node would read the claims of the whole
// cluster. Long work, such as programming an FPGA, is done when the kubelet prepares the claim,
// with the reason in the claim's status.
//
// # Partitions
//
// Several devices may consume one set of counters. The device that represents the whole physical
// device has the compatibility group "whole", and the other devices have "parts": a whole is never
// allocated beside a partition, and partitions are allocated together as far as the counters
// suffice. The partition type consists of the name of the physical device and the usual name of the
// partition, since the status of a pool compares the count of a type with the remainder of one set.
// If the types of some devices of a pool are unknown, or if there are more types than the 32 that
// the status supports, the pool has no types.
package driver
