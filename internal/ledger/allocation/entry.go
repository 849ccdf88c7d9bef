package allocation

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
)

// Counters are amounts of the counters of a physical device.
type Counters = map[string]resource.Quantity

// Amounts are amounts of the capacities of a shared device.
type Amounts = map[resourceapi.QualifiedName]resource.Quantity

// Hold is one device of an entry, with the allocated part.
type Hold struct {
	Device, Silicon string
	Whole           bool     // the whole physical device
	Takes           Counters // otherwise, amounts of its counters
	Amount          Amounts  // for a shared device; nil means all
	Form            string   // how the device is divided into shares
	Shares          int64    // number of shares, 0 if not known
	Open            bool     // blocks no other owner; also set for admin access
	Nodes           []Node   // device nodes on the host, as the owner was given them

	// If Present is set, Silicon, Whole and Takes come from the present snapshot, because the entry's
	// file does not contain them. Silicon is used if the device is gone.
	Present bool
}

// Entry is the allocation of one owner: a [*Claim], a [*Grant] or a [*Sealed], which are the data
// of their files, or a lease, which has no file. An Entry is never modified.
type Entry interface {
	Key() string
	API() discovery.Mode
	Owner() Owner
	Holds() []Hold
	Files() []discovery.HostFile
}

// Owner is the owner of an entry: a claim, or a container with a grant. An owner has no name until
// the agent has learned its name. The zero Owner is the agent itself.
type Owner struct {
	API             discovery.Mode
	Namespace, Name string    // of the claim, or of the pod
	UID             types.UID // of the claim
	Container       string

	WithheldReason string `json:"-"` // reason why the devices of an ended owner are kept; "" before its end
}

// String names the owner in messages for other owners.
func (o Owner) String() string {
	switch {
	case o == Owner{}:
		return "the agent, which is changing it"
	case o.WithheldReason != "":
		had := o
		had.WithheldReason = ""
		return fmt.Sprintf("%s, which has ended: %s", had, o.WithheldReason)
	case o.API == discovery.ModeDRA && o.Name == "":
		return fmt.Sprintf("claim with UID %s", o.UID)
	case o.API == discovery.ModeDRA:
		return fmt.Sprintf("claim %s/%s", o.Namespace, o.Name)
	case o.Name == "":
		return "a container that the kubelet is starting"
	}
	return fmt.Sprintf("%s/%s %s", o.Namespace, o.Name, o.Container)
}

// NameFor names the owner in a message for another owner. The other owner may be a later claim with
// the same name.
func (o Owner) NameFor(other Owner) string {
	if o.API == discovery.ModeDRA && o.Name != "" && o.WithheldReason == "" && other.API == o.API && other.Namespace == o.Namespace && other.Name == o.Name {
		return fmt.Sprintf("an earlier %s with UID %s", o, o.UID)
	}
	return o.String()
}

// State is the progress of an entry.
type State int

// The states of entries. All except None and Ended block other owners.
const (
	None        State = iota // no entry exists
	Reserved                 // the file is being written
	Uncertain                // the write failed, and so did reading the file
	Configuring              // the claim's devices are being changed
	Allocated                // a container has the devices, or may start with them
	Ending                   // the outputs are being removed
	Ended                    // a claim of an earlier boot
)

// String returns the name of the state.
func (s State) String() string {
	return [...]string{"None", "Reserved", "Uncertain", "Configuring", "Allocated", "Ending", "Ended"}[s]
}
