// Package scan reads the devices of a host. [ReadHost] calls every [discovery.Family] and returns a
// [discovery.Snapshot]. A [Watch] scans repeatedly: after kernel events, which [Listen] receives,
// and at an interval. A [Settler] turns the readings of successive scans into states.
//
// # Hanging reads
//
// Families are read concurrently, each in a goroutine of its own. Nothing is published before a
// first family has returned. After ten seconds the scan continues without the families that have
// not returned, and their devices are treated as unreadable. If one read has lasted five seconds by
// then, the next scan follows at once, and reads the family without the hanging device. So one hung
// GPU does not make seven good GPUs Unknown, and a hanging file is never read twice. If one read
// has delayed a family for a while, each device of the family is also read alone, all concurrently:
// seven hung GPUs are known after the same ten seconds, and the eighth stays usable. A family that
// hangs without one identifiable read keeps its last result until its late result arrives.
//
// # Events and scans at rest
//
// A kernel event names a device. While all events of the host reach the agent, a scan after an
// event reads only the families that may depend on that device (concerns.go): a family that matches
// other devices than before, and a family whose last scan read the device, a directory above or
// below it, its node, or data that the kernel keeps elsewhere for the device, such as its IOMMU
// group. Families of leftovers are read again if other devices are left for them. The results of
// all other families are kept. An event that concerns no family, such as an event of /dev/null or
// of a pod's veth interface, causes no read at all. All families are read at every tenth interval,
// after a scan with a problem, and if the kernel dropped events or a part of the agent requests a
// complete scan. If a complete scan takes so long that ten intervals are less than a hundred times
// its duration, as with thousands of functions, the next one follows after that time, and at the
// latest after an hour. TestEventsSuffice changes recorded hosts at random and compares the result
// with scans that read everything.
//
// A family must not read through links, except those of /sys/class and /sys/bus: an event names the
// device at the end of a link. LinkTo of sysfs.Device returns that device.
//
// A scan follows 20 ms after the first event, and later while events continue, and a burst of
// events causes only a few scans (pace). Events that concern no family have no influence on this.
// At each interval, the agent reads only the files of the families' last scans whose changes cause
// no events (trace), such as counters and the nodes in /dev. Of the virtual functions of a physical
// function, one stands for all. The time of a directory in /dev shows that none of its nodes was
// added, removed or replaced. A family returns the same result for the
// same host, so if all of these files are unchanged, the snapshot is unchanged too. Otherwise the
// families with changed files are read again. An agent in its own network namespace receives the
// events of all devices except network interfaces. The agent compares the names of the interfaces
// each second, and generates events from the differences.
//
// # Joining
//
// [Findings.Snapshot] is pure, and does the work common to all families:
//
//   - Devices that are used through one IOMMU group become one physical device and one unit.
//     Functions for which passthrough is only permitted remain separate. discovery.JoinGroups joins them
//     while one of them is bound to a vfio driver, or while a resource requests passthrough. If
//     entries of the configuration then assign the physical device to two APIs, neither API offers
//     the device, and a claim with one of the functions keeps that function (ruled.keepSplit of
//     package agent).
//   - A device with partitions consumes the counters of all partitions, so the device is never
//     allocated beside a partition.
//   - If two devices have the same identity or the same ID in the device plugin API, both lose it.
//   - A physical function that is divided into virtual functions is omitted (pci.HasVirtualFunctions).
//   - A unit with Members, such as a card of two FPGAs, is offered with all members or not at all.
//
// # Health
//
// A device that cannot be read is not gone. Describe returns a Problem that names the device, and
// the device keeps its last description with health Unknown while its directory exists in sysfs.
// Only a missing directory makes a device gone; an unreadable directory does not. A PCI function
// that its family no longer describes because no driver is bound to it keeps its description, and
// the device is reported as one without a driver.
//
// A family returns readings. [Settler] alone turns readings into states. Settler decides when an
// unreadable device becomes Unknown, when a device has recovered, since when the state lasts, and
// which severity it has by the administrator's Severity. Settler also records since when a device
// is gone. A device that vanished while allocated recovers as after a bad reading. A free device is
// usable at once. Both APIs publish this state and have no rule of their own, with one exception:
// the driver does not report a device as Unknown while the device is being configured.
package scan
