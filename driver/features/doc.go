// Package features detects the optional fields of ResourceSlices that an API server keeps. The
// package publishes nothing.
//
// # Detection
//
// An API server drops some optional fields of a ResourceSlice if their feature gates are off or the
// server is too old, and rejects others. This package finds out which fields are kept by creating
// slices in a dry run: before the first publication, every half hour, and when the server stored a
// slice with other content than expected. The result, [Set], is positive: a feature is used only
// after the server was seen to keep it. If the server refuses the dry run itself, because a webhook
// does not support dry runs or a permission is missing, the previous result remains. A server
// rejects a slice as a whole, so each field with this risk is tried alone.
//
// # What is published without a feature
//
// The set is a parameter of pool.BuildPools, the pure function that computes slices. For each
// missing field, something else is published, and never such that the scheduler could allocate one
// physical device to two claims:
//
//   - DRANodeAllocatableResources: the host resources needed by consumers of devices are not
//     charged.
//   - DRADeviceCompatibilityGroups: counters alone express that a whole device and its partitions
//     exclude each other.
//   - DRAPartitionableDevicesType: the status of a pool does not count wholes and partitions by
//     type.
//   - DRAListTypeAttributes: attributes with several values are strings with commas between the
//     values, or have one value.
//   - DRADeviceBindingConditions: no difference.
//   - DRAConsumableCapacity: a device shared by number is published as several numbered devices, a
//     device shared by amount is for one claim, and interchangeable devices are published one by
//     one.
//   - SeparateCounters (1.35): counters are in one slice with all devices that consume them.
//   - DRAPartitionableDevices: of competing devices, only devices are published which can all be
//     allocated together.
//   - DeviceTaintEffectNone (1.35): taints without an effect are omitted.
//   - DRADeviceTaints: unhealthy devices are omitted.
//
// Features with a version have no feature gate.
package features
