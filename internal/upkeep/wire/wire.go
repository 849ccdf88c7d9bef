// Package wire is how an agent and a vendor's own program talk about what that program does
// for claims: HTTP on a unix socket of the node, with JSON.
//
//	GET    /claims        all that is done, as a list of [Claim]
//	PUT    /claims/UID    begin, with an [Order], and answer once it is so; no error if it is so already
//	DELETE /claims/UID    end it, and answer once nothing is left; no error if there is nothing
//
// An error is a status of 400 and above with a line that says why.
package wire

// Socket is the name of the socket in the program's directory.
const Socket = "socket"

// Path is that of the claims, below which each has its UID.
const Path = "/claims"

// Order is what is to be done for a claim, in the words of the devices' family.
type Order struct {
	How map[string]string `json:"how"`
}

// Claim is what is done for a claim.
type Claim struct {
	UID string            `json:"uid"`
	How map[string]string `json:"how"`

	// Process is the one that serves the claim, if there is one.
	Process Process `json:"process,omitzero"`

	// Begun is whether all of it was done.

	// Changed says that a GPU may be other than it is for all. It is written before the first change, and removed once
	// it was read back that the GPUs are as they were.
	Changed bool `json:"changed,omitempty"`
	Begun   bool `json:"begun,omitempty"`

	// Broken is why it is not so any more, "" if it is.
	Broken string `json:"broken,omitempty"`
}

// Process is a process of the node. Its start, in the kernel's clock ticks since boot, tells it
// from a later one of the same number.
type Process struct {
	PID   int    `json:"pid,omitempty"`
	Start string `json:"start,omitempty"`
}

// Record is the name of the file, in the directory that a claim has in the program's, in
// which the program writes down its [Claim] before it begins.
const Record = "record.json"
