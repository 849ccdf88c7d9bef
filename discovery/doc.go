// Package discovery defines the devices of a host as data, and the families that describe them.
//
//	kernel devices -> match -> a scan of each family -> merge with the last scans -> join -> Settle -> rules.ApplyTo -> Place
//	                           (PCI health included)
//
// Package scan has the steps from the kernel devices to the settled states. Package pci has the
// common parts of all families of PCI functions. The three packages only read the host. They do not
// write, log, run commands or connect to Kubernetes.
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
