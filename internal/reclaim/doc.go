// Package reclaim withholds a device between two owners: until every process of the previous pods
// has closed the device, and until the device was reset, if the administrator requests a reset. If
// the package cannot see whether a device is open, the device is not withheld. The package has no
// vendor-specific code, and the ledger decides on allocations.
//
// # Records
//
// DriverConfig.reclaim selects the devices to reclaim. [Manager] is an output of the ledger.
// When such a device is allocated, it records the consumer and the consumer's pods. When the
// consumer ends, Remove marks that record and keeps the device in the ledger ([ledger.KeptDevice])
// before the consumer's own entry ends, so the physical device is never free in between. A kubelet
// allocates an ID of the device plugin API again before the end of its container was reported, so
// AllocateIDs checks first ([ledger.GrantReplacer]).
//
// # Release
//
// The device is released when no process in the pods' control groups has it open (inuse.ByPods) and
// its reset has ended. Each check runs alone: a hanging check delays its own device only. A record
// contains the key of the physical device ([discovery.DeviceKey]): a device with another key is
// another device, and is not reset. If the agent cannot see which process has the device open, the
// device is withheld for as long as containers of the pods may continue. If the pods are unknown,
// nothing is reset. A reset happens after everything else of the claim is removed (ForgetClaim),
// since the end of a claim may fail.
//
// Before a reset, the package checks the ledger for a new consumer of the device, which is possible
// after an agent without reclaim. The device then belongs to that consumer and is not reset. A
// device whose check has failed is unhealthy in snapshots. This overrides the settled state, so
// that no recovery period follows.
//
// # Restarts
//
// An agent that starts withholds the devices of marked records before it opens the ledger. It also
// withholds the devices of the other records from other consumers until it has verified that their
// claims or containers continue: a claim or container can end although its record could not be
// marked, and the record is then still on disk. When Run returns, nothing writes to a device or a record any more, except for a
// call that the kernel has not completed. The lease of that call keeps the node's lock.
package reclaim
