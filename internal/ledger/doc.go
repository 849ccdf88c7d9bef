// Package ledger records which consumer has which device, by DRA and by the device plugin API. It
// writes an allocation down before the consumer gets the device, excludes other consumers, and
// keeps the files that belong to an allocation up to date. The package has no vendor-specific code
// and calls no API.
//
// The package allocation has the data of an allocation and its files, and the package exclusion has
// the rule which allocation excludes which. This package has the states of allocations.
//
// An [allocation.Entry] is an allocation: a [allocation.Claim] through DRA, a [allocation.Grant]
// for one ID of the device plugin API, or a lease for a change of a device by the agent. The
// methods for each kind have a type of their own: [Ledger] for claims, [Grants] and [Leases]. They
// share one mutex and one set of accounts.
//
// # Rules
//
// One lock: a mutex guards all entries, and no I/O is done under the mutex. [Ledger.AllocateClaim]
// and [Grants.AllocateIDs] decide for both APIs under this mutex, so neither API has to call the
// other. Claims and grants have calls of their own, since all grants are in one file.
//
// One rule: the check that returns [exclusion.Blocked] alone decides which entry excludes which
// other: for Prepare, Allocate, lists, moves between the APIs and changes of devices.
//
// Nothing is undone: a claim keeps the state that it has reached, and the next call continues from
// there. A grant whose file cannot be written ends, since the kubelet never repeats Allocate.
//
// # States
//
// Each state lists its meaning; whether it excludes other consumers; the state after a crash of the
// agent; and the state after a disk error.
//
//   - Reserved: the file is being written. Excludes others. After a crash: the previous state,
//     or the new one if the file is complete. After a disk error: the state in the file, which is
//     read again.
//   - Uncertain: the file could be neither written nor read. Excludes others. After a crash: the
//     state in the file. After a disk error: the file is read again before any other step.
//   - Configuring: the devices of a claim are being changed. Excludes others. After a crash:
//     Configuring. After a disk error: unchanged; the next Prepare continues.
//   - Allocated: a container has the device, or may start with it. Excludes others. After a
//     crash: Allocated, and the outputs are written again. After a disk error: unchanged; the
//     outputs are tried again.
//   - Ending: the outputs are being removed. Excludes others. After a crash: Allocated. After a
//     disk error: a claim becomes Allocated again, a grant stays Ending; both are tried again.
//   - Ended: a claim of an earlier boot. Excludes no consumer, and stays Ended after a crash or a
//     disk error.
//   - Sealed: the file cannot be interpreted. The devices that the file names are excluded. The
//     entry stays sealed after a crash or a disk error.
//
// # Events
//
// Each event lists the states before and after it.
//
//   - Prepare or Allocate: from nothing or Ended to Reserved, then to Configuring or Allocated.
//   - Prepare, after the work on the device: from Configuring to Allocated.
//   - Prepare again: Allocated stays Allocated, with the same answer.
//   - Prepare of another allocation of the same claim: from any state to Ending, then as from
//     nothing. If the claim is Allocated, this happens after 30 s, since the containers of a pod
//     that was deleted by force may still run.
//   - Unprepare, or the sweep of abandoned claims: from any state to Ending, then to nothing.
//   - A failed Unprepare: Allocated stays Allocated, with its outputs, since a kubelet up to 1.36
//     starts the next pod of the claim without another call.
//   - The end of a consumer whose device is reclaimed: from nothing to a lease ([KeptDevice]), with
//     a record in the journal, until the device is released.
//   - A change of a device by the agent (passthrough and its return, creation and removal, a
//     reset, programming): from nothing to a lease without a file, until the last write has ended.
//   - A consumer requests a device that only one process at a time can open, and a process has it
//     open (Config.OpenBy): the request is refused, and the entry returns from Reserved to its
//     previous state.
//   - PodResources lists the container: from a grant or nothing to Allocated, with the container as
//     consumer.
//   - PodResources omits the container for 10 s: the grant becomes Ending.
//   - PodResources has not listed the grant within 5 minutes, and no init container of the pod
//     requests the resource: the grant becomes Ending. PodResources does not list init containers.
//   - The kubelet allocates the same ID again: the newer grant has the device. Claims wait for the
//     containers of both grants.
//   - PodResources lists an ID that another plugin allocated: from nothing to an entry without a
//     file, which excludes other consumers while the ID is listed. If no device has the ID, the
//     device nodes in the kubelet's checkpoint for that ID identify the device.
//   - A reboot: a claim becomes Ended. A grant stays Allocated, since the kubelet starts its pod
//     again without another call.
//
// # Leases
//
// A lease ([Leases.LeaseDevices]) is an entry for a change of a device by the agent. A lease begins
// before the first write and ends after the last one, even if the kernel delays a write for longer
// than the agent waits ([Lease.Do]). It names the devices that no consumer may get, the PCI
// functions that only one lease at a time may change, and the consumer for which the change is
// made. The agent's writes of attributes are refused for a function without a lease. An agent that
// ends begins no new lease. While a lease is left, the agent does not release the node's lock; the
// kernel releases the lock at the end of the process.
//
// A function in a lease is a [discovery.DeviceKey] instead of an address, which the kernel may
// assign to another card. Within one boot, the address and the inode of the function's directory in
// sysfs are sufficient: the kernel creates a new directory when it registers the function again,
// and keeps the directory through resets and changes of the driver. So a write under a lease on the
// earlier function is refused. The journal's records of passthrough and of creation contain this
// key too. A record of a function that was registered again is void: nothing is returned and
// nothing is removed, since the kernel has undone the change. Records of reclaim also contain the
// vendor, device and subsystem IDs and the UUID or serial number. A device with another key is not
// reset.
//
// [Leases.KeepDevice], [KeptDevice] and [Leases.IsTaken] serve one kind of lease, for a consumer
// that has ended: KeepDevice begins the lease, and IsTaken applies the rule of [exclusion.Blocked]
// to find out whether another consumer has the device by now.
//
// # Start
//
// The agent creates the ledger first, passes it to both APIs, and opens it as soon as the agent has
// the node's lock. A sealed entry exists beside the valid entry of the same claim, if there is one.
// A CDI spec without a claim's file also becomes a sealed entry, until Unprepare or the sweep.
//
// A new claim waits until the kubelet has listed all its pods once, since one of the pods may have
// the device by an ID that another plugin allocated. If a device is found later, the ledger first
// finds the device in the kubelet's list, before a claim can get the device (method SetHostDevices
// of legacy.Plugin). Allocate does not wait. Its lists exclude the devices that the kubelet has
// recorded for containers (device-plugins/kubelet_internal_checkpoint) by IDs that are not in the
// list, since the kubelet takes these IDs for other devices.
//
// # PodResources
//
// A physical device that moves from the device plugin API to DRA waits longer than 10 s: for the
// termination grace period of the pod, or 30 s if the period is unknown. The kubelet removes a pod
// that is deleted by force from its records at once, while the containers still run. The time
// starts when the kubelet last began to answer completely, since a stopped kubelet ends no
// containers.
//
// Omissions in an answer of PodResources are used only if the answer is whole: if it lists the
// agent's own pod, which is not static. A kubelet that has just started lists no pods, then static
// pods, and the others only after an answer of the API server
// (pkg/kubelet/apis/podresources/server_v1.go). For an agent outside a pod, an answer is whole if
// it lists all pods of the last whole answer, or every unfinished pod that the API server has bound
// to the node.
//
// While PodResources gives no whole answer, or grants.json cannot be read, the first list of a
// resource also contains the IDs in the kubelet's checkpoint, as Unhealthy. Otherwise a kubelet
// with a topology policy would panic at its start because of an ID that a pod has and that no list
// contains (pkg/kubelet/cm/devicemanager/topology_hints.go, generateDeviceTopologyHints, read in
// 1.34 to 1.37).
//
// # Outputs
//
// An [Output] writes CDI specs, metadata files or files of the host. The DRA library writes the
// metadata files. The driver moves them to a directory with the claim's UID, and keeps a copy of
// their CDI specs there. The ledger compares all outputs with its entries at each change and every
// 30 s. It writes missing outputs and removes outputs without an entry. The copies are removed
// last, after the claim's file: if the end of a claim was interrupted, the claim is Allocated
// again, and the metadata cannot be computed from the claim's file.
//
// Pods may share a claim, and the claim may be prepared again after its device nodes have changed.
// The claim then also keeps the earlier nodes until it is unprepared, since containers run with
// them.
//
// # Synchronized writes
//
// A synchronized write waits for the disk, so only few writes are synchronized. A claim's file
// names its boot, and a reboot voids the claim: the file must survive a killed process, but not a
// loss of power. Grants survive a reboot. One small file, boot, names the boot before the first
// claim of that boot is allocated. An agent that starts synchronizes the directories again, since
// the previous agent may have been killed in between. If the file boot names another boot then,
// claims' files that the loss of power left empty are from the past. In the same boot, an empty or
// damaged file without a spec excludes all consumers from all physical devices without unlimited
// sharing, until the claim is unprepared or swept.
//
// Synchronized writes, with the reason and the test (a break is a defect in "make simulate-breaks",
// see below):
//
//   - boot: distinguishes files that a loss of power damaged from files that were damaged in this
//     boot. Break "the file boot is not synchronised".
//   - grants/grants.json: the kubelet starts pods again without another call. Break "the file of
//     grants is not synchronised".
//   - The content of both files: a new name may exist without its content. Break "what a file
//     holds is not synchronised".
//   - The new names of both files: a content may exist without its new name. Break "a new name of
//     a file is not synchronised".
//   - Files of claims with chosen devices ([allocation.Result.IsChosen]): after a reboot, a kubelet
//     up to 1.36 adds the CDI devices of the next answer to those that it has recorded (addDevice
//     in pkg/kubelet/cm/dra/claiminfo.go, read in 1.31; in 1.37, resetDevices precedes it), so the
//     claim must get the same devices. TestChosenDevicesAreSynchronised.
//   - The names of their directories, at the start of an agent and after a removal of the
//     directories: without its directory a file is lost. Break "names of directories are not
//     synchronised", and TestDirectoriesAreSynchronised.
//
// Writes that are not synchronized, with the reason. The whole simulation tests each of them, and
// so do the tests named here:
//
//   - Files of all other claims: a reboot voids them, and the kubelet prepares its claims again.
//   - CDI specs and files of the host: they are in /var/run, which is in memory.
//   - Metadata and the copies of their specs: they are written again with the claim.
//   - /run/chandler/journal/reclaim, on tmpfs: a reboot ends all processes.
//     TestAgentIsKilledWhileItReclaims.
//   - /run/chandler/journal/rebind, on tmpfs: a reboot voids the records together with the
//     bindings. TestReboot of internal/passthrough.
//   - /run/chandler/journal/create, on tmpfs: a reboot voids the records together with the created
//     devices. TestWhatIsNotOurs of internal/ondemand.
//   - mode, health.json and events.json: an agent without them computes the content again.
//   - Removals: a file or directory that reappears is from the past, and is swept.
//     TestOutputsThatCannotBeSwept.
//
// TestPowerLoss of e2e/guest tests the same on a real ext4 file system, in a guest that is reset at
// random moments; see "On real kernels" in docs/testing.md.
//
// A break is a defect that "make simulate-breaks" builds into the product, one at a time. The disk
// of the simulation keeps no more than POSIX guarantees. After a loss of power, each name may have
// any state since the last synchronization of its directory. A file that was not synchronized may
// be complete, empty, cut off or full of zeros. A directory may be missing, or may have reappeared.
// The power is lost about five times in each seed, once in the middle of a write. Four further
// defects were not found by 1,000 seeds, so only unit tests cover them: containers of deleted pods
// are assumed to have ended (TestForceDeletedPod), a lost file of a claim is not written again
// (TestWipedDirectoryIsWrittenAgain), a physical device changes its form while it is allocated
// (TestRuledOfAnotherNumber), and an ID leaves a list at once (TestIDIsUnhealthyBeforeItLeaves).
//
// A sealed claim without a file gets one at once, claims/<uid>.bad0, with all known facts about the
// claim, so that this information survives the agent. If claims' files were lost, the file boot
// records this until the next boot. Until then, claims that only the kubelet has recorded exclude
// other consumers.
//
// Two cases are open. If the agent's directory, including boot, is deleted, and the machine reboots
// before an agent has started, no file informs that agent of the reboot. The kubelet still lists
// the devices of the earlier claims, but not how much of them was allocated. So claims that had
// shares of one device exclude each other, since any of them might still run. An administrator has
// to delete all of their pods but one.
//
// If grants.json is deleted, and the configuration starts to share a device by number before
// PodResources has listed the device's container, the ledger may consider the container's ID a
// share of the device, and other containers may get the other shares. The same applies to a
// container of a replaced plugin that had the whole device. Only IDs with a [discovery.Dialect]
// with a Stem are affected: "card1-0" is the ID of a whole Intel GPU without sharing, and of its
// first share with sharing.
package ledger
