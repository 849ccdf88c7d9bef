// Package driver implements Dynamic Resource Allocation: it publishes the snapshot of a host's
// devices in ResourceSlices, prepares and unprepares claims for the kubelet, and reports device
// health to the kubelet. The package contains no vendor-specific code. Of the host it reads only
// the device nodes and network interfaces that it gives to containers.
//
// # Publishing
//
// The publisher (publish.go) is one loop around one pure function. The arguments of the function
// are the desired slices, the slices published last, the time of the registration by the kubelet,
// the time of the last answer of the API server, and the present time. The result is to publish, to
// query the features of the server, or to wait for a duration. The loop wakes when any of these
// arguments changes.
//
// At the start, the driver waits 30 seconds for the features of the API server (package features).
// Without an answer it publishes the required fields only, logs the missing features with the
// reason, and tries again about once a minute.
//
// At no time during a change of features or devices can both a whole device and its partition be
// allocated: the controller of the DRA library writes slices such that the pool is incomplete, and
// therefore not used, until it is completely new. Before competing devices are published for the
// first time, the server is queried once more. A device that a claim has stays in the slices, with
// the counters that it consumes, after the device is gone, also on a server without taints. If the
// consumed counters are unknown, the rest of the physical device is omitted until the claim has
// ended. If consumers have a device under names that would no longer be published, because the form
// of the device has changed, the device is omitted until these consumers end.
//
// The driver sets the owner of a slice when it creates the slice: the present Node. It reads the
// Node once for all slices that are created within ten seconds, and never at rest. So the slices
// remain if the Node is deleted and created again by the kubelet.
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
