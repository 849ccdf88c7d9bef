package ledger

import (
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// Counters say how much is taken of the counters of a piece of silicon.
type Counters = map[string]resource.Quantity

// Amounts say how much is taken of the capacities of a device that several
// owners have together.
type Amounts = map[resourceapi.QualifiedName]resource.Quantity

// Hold is one device in an entry, and how much of it.
type Hold struct {
	Device, Silicon string
	Whole           bool     // all of the silicon
	Takes           Counters // else, of its counters
	Amount          Amounts  // of a shared device; nil: all of it
	Form            string   // how the device is cut into shares
	Shares          int64    // into how many, 0 if that is not known
	Open            bool     // keeps nobody out; so does admin access
	Nodes           []Node   // of the device on the host, as the owner was given them

	// Present says that Silicon, Whole and Takes are for the present snapshot to
	// say, since the entry's file does not. Silicon holds if the device is
	// gone.
	Present bool
}

// Node is a device node of the host.
type Node struct {
	Path  string `json:"path"`
	Type  string `json:"type"` // "c", "b" or "p"
	Major uint32 `json:"major,omitempty"`
	Minor uint32 `json:"minor,omitempty"`
}

// Entry is what one owner has: a [*Claim], a [*Grant] or a [*Sealed], which are
// data as in their files, or a lease, which has no file. It is never modified.
type Entry interface {
	Key() string
	API() discovery.Mode
	Owner() Owner
	Holds() []Hold
	Files() []discovery.HostFile
}

// Owner is whose an entry is: a claim, or a container that has a grant. One
// that is not known yet has no name. The zero Owner is the agent itself.
type Owner struct {
	API             discovery.Mode
	Namespace, Name string    // of the claim, or of the pod
	UID             types.UID // of the claim
	Container       string

	left string // why what it had is kept, though it has ended; "" if it has not
}

// String names the owner for those who may not have what it has.
func (o Owner) String() string {
	switch {
	case o == Owner{}:
		return "the agent, which is changing it"
	case o.left != "":
		had := o
		had.left = ""
		return fmt.Sprintf("%s, which has ended: %s", had, o.left)
	case o.API == discovery.ModeDRA && o.Name == "":
		return fmt.Sprintf("claim with UID %s", o.UID)
	case o.API == discovery.ModeDRA:
		return fmt.Sprintf("claim %s/%s", o.Namespace, o.Name)
	case o.Name == "":
		return "a container that the kubelet is starting"
	}
	return fmt.Sprintf("%s/%s %s", o.Namespace, o.Name, o.Container)
}

// before names the owner for another, which may be a claim that has the name
// that this one had before it.
func (o Owner) before(other Owner) string {
	if o.API == discovery.ModeDRA && o.Name != "" && o.left == "" && other.API == o.API && other.Namespace == o.Namespace && other.Name == o.Name {
		return fmt.Sprintf("an earlier %s with UID %s", o, o.UID)
	}
	return o.String()
}

// State is how far an entry has come.
type State int

// The states of entries. All but Past keep others out.
const (
	None        State = iota // there is no such entry
	Reserved                 // its file is being written
	Unsure                   // nor could the file be read afterwards
	Configuring              // a claim's devices are being changed
	Given                    // a container has it, or may start with it
	Ending                   // its outputs are going
	Past                     // a claim of an earlier boot
)

// String returns the name of the state.
func (s State) String() string {
	return [...]string{"None", "Reserved", "Unsure", "Configuring", "Given", "Ending", "Past"}[s]
}

// Stock is what the host has at present.
type Stock interface {
	// Device finds a device by the name that it has in the snapshot, or that
	// a share of it has in slices.
	Device(name string) (rules.Offered, bool)

	// Names returns the names of all devices.
	Names() []string

	// Parts returns the names of the devices that are parts of a piece of silicon.
	Parts(silicon string) []string

	// WithID returns what would be granted by a classic ID, whatever plugin
	// gave it, nil if nothing is known of it; and whether the resource is ours.
	WithID(resource, id string) (g *Grant, ours bool)
}

// Output is a kind of file that is there because of entries. It ignores
// entries that have no such file.
type Output interface {
	// Write makes the files of an entry what they should be.
	Write(e Entry) error

	// Remove removes the files of an entry, less those that others have too.
	Remove(e Entry, others []Entry) error

	// Sweep finds the claims that there are files of, and hands each to look with
	// what removes its files. If look does not know the claim, it removes them.
	Sweep(look func(uid types.UID, remove func() error) (known bool, err error)) error
}

// Keeper is an Output that cannot make its files from an entry, and keeps copies of them.
type Keeper interface {
	// Forget removes the copies of a claim's files. It is called when nothing else of
	// the claim is left: a claim that began to end, and did not, is given again.
	Forget(uid types.UID) error
}

// Tidier is an Output of which writers that are killed leave temporary files.
type Tidier interface {
	// Tidy removes those of an age; see [disk.Files.Sweep].
	Tidy(age time.Duration) error
}

// Namer is an Output whose files say by themselves whose they are.
type Namer interface {
	// Named returns the devices that the files of each owner name, by key. It
	// returns nil, and why, if it cannot be told which owners have files.
	Named() (map[string][]SealedDevice, error)
}
