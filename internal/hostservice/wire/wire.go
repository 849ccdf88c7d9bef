// Package wire is the protocol between the agent and the programs beside it: HTTP on a Unix socket
// of the node, with JSON. The package contains data only.
//
// A host service changes and examines the host for the agent:
//
//	GET  /service          returns the [Service]
//	PUT  /sessions/ID      begins the session of an agent, the only one that may write; returns when all writes of earlier sessions have ended
//	PUT  /write            does a [Write]; returns when the kernel has accepted or refused the value
//	PUT  /partitions       makes a [PartitionChange]; returns an [Output] when the program has ended
//	PUT  /configure        gives a device the parameters of a [Configuration]; returns when the device has them
//	POST /programs/NAME    runs a program until the request's body ends; returns its output; each empty line of the body requests a scan
//	POST /users/functions  answers a [FunctionQuery]
//	POST /users/pods       answers a [PodQuery]
//
// A vendor's program does work for claims:
//
//	GET    /claims        returns the list of all [Claim] values
//	PUT    /claims/UID    begins the work of an [Order]; returns when the work is complete or already was
//	DELETE /claims/UID    ends the work for a claim; returns when everything is removed or already was
//
// An error is a response with status 400 or higher and one line with the reason.
package wire

// Socket is the name of the socket in the program's directory.
const Socket = "socket"

// ClaimsPath is the path of the claims. Each claim has the path of its UID below.
const ClaimsPath = "/claims"

// Order is the work for a claim, in the terms of the devices' family.
type Order struct {
	How map[string]string `json:"how"`
}

// Claim is the state of the work for a claim.
type Claim struct {
	UID string            `json:"uid"`
	How map[string]string `json:"how"`

	// Process is the process that serves the claim, if any.
	Process Process `json:"process,omitzero"`

	// Changed means that a GPU may have unusual settings. The program writes Changed before the
	// first change, and clears Changed after a read has verified that the GPUs are restored.
	Changed bool `json:"changed,omitempty"`

	// Unchanged are the GPUs of How whose settings the program has not changed, because the change of
	// the first of them was refused.
	Unchanged []string `json:"unchanged,omitempty"`

	// Boot is the ID of the boot in which the settings were changed, "" if unknown. A reboot
	// restores the settings.
	Boot string `json:"boot,omitempty"`

	// Begun is set when the order has been completed.
	Begun bool `json:"begun,omitempty"`

	// Broken is the reason why the work has ended unexpectedly, or "".
	Broken string `json:"broken,omitempty"`
}

// Process is a process of the node. Start is the start time in the kernel's clock ticks since
// boot, which distinguishes the process from a later process with the same PID.
type Process struct {
	PID   int    `json:"pid,omitempty"`
	Start string `json:"start,omitempty"`
}

// Record is the name of the file with the [Claim] in the claim's directory, which is below the
// program's directory. The program writes the file before it begins the work.
const Record = "record.json"
