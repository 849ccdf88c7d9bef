// Package allocation has the data of allocations: which consumer has which devices, and the form of
// these data on disk. The package decides nothing about allocations.
//
// An [Entry] is an allocation: a [Claim] through DRA, a [Grant] for one ID of the device plugin
// API, a [Sealed] claim whose record cannot be read, or a [LeaseEntry] for a change of a device by
// the agent. Entries are never modified. A [Hold] is one device of an entry. [Files] has the files
// of a node's ledger; [ReadOwners] reads them for programs other than the agent.
//
// # Versions
//
// A claim's file outlives the agent that wrote it, and an older agent may follow a newer one. The
// file contains the version of the agent that wrote it, and readableBy, the oldest version that may
// use the file. An agent that may use a file respects its content and keeps unknown fields. Any
// other file, like a damaged one, is sealed: the file is set aside, and its devices are excluded
// until the claim is unprepared. The tests' testdata contains the files of each version, which all
// later versions read.
package allocation
