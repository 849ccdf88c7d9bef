// Package discovery finds the accelerators of a host and describes them as data. [Scan] calls every
// [Family] and returns a [Snapshot]. The package only reads the host. It does not write, log, run
// commands or connect to Kubernetes.
//
//	kernel devices -> match -> a scan of each family -> merge with the last scans -> join -> Settle -> rules.ApplyTo -> Place
//	                           (PCI health included)
//
// # Stages
//
// Each stage has a type of its own. A [Device] is the state of the host. Its field PluginOffers
// contains all possible offers of the device in the device plugin API. A rules.Offered is the
// result of the administrator's configuration. It embeds the device, and adds the named offers, the
// sharing of the device, its mode, its overhead and its desired configuration. Neither type
// contains the placement. States are settled before the rules apply, since a state does not depend
// on the configuration, and an excluded device is not gone.
//
// # Families
//
// A family is a value of [Family]: a name, a line of documentation, the matching kernel devices,
// and Describe. Describe gets all matches at once, and returns Devices and Problems. Code for one
// vendor exists only in the directory of a family.
//
// The other fields of Family are for hardware that needs more:
//
//   - AllowsPassthrough: Grant of this family also serves devices of other families while these are
//     bound to a vfio driver. Example: vfio.
//   - Grant: what a container needs because of the set of its devices, their amounts, and the
//     parameters of the claim. Grant is pure. Example: NVIDIA_VISIBLE_DEVICES.
//   - Parameters and Accept: the supported parameters of a claim, and a check of parameters
//     against a set of devices. Example: acceleratorFunction.
//   - Variables: the vendor's documented tuning variables, which a claim may set. Example: ROCR_…
//   - Configure: whether a device is in the state requested by a claim, and the work to establish
//     this state. Example: programming an FPGA.
//   - Create and Remove: the work to create devices for consumers, and to remove them. Package
//     ondemand runs the work. Example: virtual functions.
//   - Order: what the family's program maintains for a claim as long as the claim has its devices.
//     Package sharing sends the order. Example: an MPS daemon.
//   - Provision: the writes to configure a PCI function according to the administrator's
//     configuration. Package provision does the writes. Example: the services of Intel QAT.
//   - Programs: programs for queries to the vendor's library. Example: chandler-host.
//   - Labels: labels of the node, as data: names and values with words in braces, which stand for
//     attributes, capacities, counts, and for the Facts of devices that exist for labels only.
//     Example: nvidia.com/gpu.product is {model}.
//   - Roots: directories that the administrator may configure for the family. Example: bitstreams.
//   - Leftovers and Unclaimed: the family runs last. A Leftovers family gets only matches without
//     a description or a failed read by another family. An Unclaimed family does not even get
//     matches of other families. Example: vfio.
//   - Always: Describe is called even if no kernel device matches. Example: hypervisor, for nodes
//     whose modules are not loaded yet.
//   - FromConfig: the family describes paths in the configuration, and Describe is called even if
//     no kernel device matches. Example: paths.
//
// The fields of an offer, and Device.OptIn, describe where the offers of a device in the device
// plugin API come from:
//
//   - Resource, a pattern: the administrator chooses the name, which is any name or a name in one
//     domain. Examples: "*", "nvidia.com/*".
//   - Optional, of an offer: the offer exists if the administrator configures this name, and it
//     replaces the device's other offers. Example: a GPU by its partition mode.
//   - OptIn, of a device: the device exists, for both APIs, only if the administrator configures
//     one of the names offered by the device. Example: all GPUs at once, for a monitor.
//   - SRIOV: the offer exists if the administrator's entry is a pool of the SR-IOV network device
//     plugin. Example: a PCI address, where KubeVirt uses the IOMMU group.
//   - Dialect: the form of IDs of shares in the replaced plugin. The dialect writes such IDs, and
//     recognizes the IDs of running containers. Examples: card1-0, nvidia0/vgpu1.
//
// A vendor's library may hang or crash, so the agent runs the library in a separate program, which
// prints lines of text. The agent adds this text to the host's file system as a file in memory,
// such as /run/chandler/nvml.json, and the family reads the text like any other file. So host
// recordings contain the file too, and a family remains a reader. If a program stops responding
// permanently after its first output, the file records this, and the family reports a Problem for
// each device.
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
// Join is pure, and does the work common to all families:
//
//   - Devices that are used through one IOMMU group become one physical device and one unit.
//     Functions for which passthrough is only permitted remain separate. JoinGroups joins them
//     while one of them is bound to a vfio driver, or while a resource requests passthrough. If
//     entries of the configuration then assign the physical device to two APIs, neither API offers
//     the device, and a claim with one of the functions keeps that function (ruled.keepSplit of
//     package agent).
//   - A device with partitions consumes the counters of all partitions, so the device is never
//     allocated beside a partition.
//   - If two devices have the same identity or the same ID in the device plugin API, both lose it.
//   - A physical function that is divided into virtual functions is omitted (HasVirtualFunctions).
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
//
// # Identity
//
// Major and minor numbers come from sysfs and are part of the Device's edits, so that Prepare can
// compare the node in /dev with the described node. A node belongs to one device, unless the family
// lists the node in CommonNodes, such as /dev/nvidiactl.
//
// If a device was replaced by another one, the driver asks the API server once which claims the
// device is allocated to. These claims were promised the previous device, so their Prepare is
// refused. No clocks are compared.
//
// Host recordings are read in memory, without access to the present machine. Only "chandler
// simulate --device-nodes" creates real device nodes.
package discovery
