// Package inventory says what devices a machine has, where they stand, how they are, who
// has them and what waits. It is pure: one function makes an [Inventory] of a snapshot and
// of who has what. The terminal, the page and -o json show the same one.
package inventory

import (
	"cmp"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// Facts are what an inventory is made of. They are only read.
type Facts struct {
	Name       string // of the machine
	Version    string // of this program
	Kubernetes string // the server's version, "" if it is not known
	Recorded   string // name of the recorded host, "" of a live machine
	Families   int    // how many looked at the host
	Functions  int    // PCI functions of the host, 0 if they were not counted

	Snapshot *rules.Snapshot // with settled health where an agent has settled it

	// Asked says that it is known who has what. Without it the Holders and the Moves are
	// empty, and no device counts as free.
	Asked   bool
	Holders []Holder

	API   map[string]discovery.Mode // which API offers what, by silicon
	Moves map[string]Move           // what waits, by silicon

	Notes []Note // what is wrong with the node as a whole

	Classes []Class // DeviceClasses that claims may name

	At time.Time // when all this was so
}

// Holder is one device that a container has.
type Holder struct {
	Device    string         `json:"device"`
	API       discovery.Mode `json:"api"`
	Namespace string         `json:"namespace,omitempty"`
	Pod       string         `json:"pod,omitempty"`       // "" while the kubelet has not named it
	Container string         `json:"container,omitempty"` // likewise
	Claim     string         `json:"claim,omitempty"`     // its name, or its UID where no more is known
	Request   string         `json:"request,omitempty"`   // of the claim
	Resource  string         `json:"resource,omitempty"`  // in the limits of the pod
	Since     time.Time      `json:"since,omitzero"`
}

// Owner names in a few words whose the device is: the pod, else the claim.
func (h *Holder) Owner() string {
	switch {
	case h.Pod != "":
		return h.Namespace + "/" + h.Pod
	case h.Claim != "" && h.Namespace != "":
		return "claim " + h.Namespace + "/" + h.Claim
	case h.Claim != "":
		return "claim " + h.Claim
	}
	return "a starting container"
}

// By names the resource in limits or the claim by which the device is had. For limits that DRA
// serves the scheduler makes a claim, whose name nobody knows.
func (h *Holder) By() string { return cmp.Or(h.Resource, h.Claim) }

// Move is what silicon waits for.
type Move struct {
	To     discovery.Mode `json:"to,omitempty"` // the API that it moves to, "" if it changes in another way
	Reason string         `json:"reason"`       // in words
	For    []string       `json:"for,omitempty"`
	Since  time.Time      `json:"since,omitzero"`
}

// Note says what is wrong with the node as a whole, and not with one of its devices.
type Note struct {
	Name   string    `json:"name"` // what is wrong, in a word or two
	Reason string    `json:"reason"`
	Code   string    `json:"code,omitempty"` // of doctor
	Since  time.Time `json:"since,omitzero"`
}

// Class is a DeviceClass.
type Class struct {
	Name      string           `json:"name"`
	Resource  string           `json:"resource,omitempty"` // its extended resource
	Selectors []rules.Selector `json:"-"`                  // all must select a device
	Length    int              `json:"-"`                  // of their expressions: the longest is the most particular
}

// Inventory is a machine's devices at one moment. It is never modified. Its JSON has all
// of it, and is stable as docs/inventory.md says.
type Inventory struct {
	Host       string    `json:"host"`
	At         time.Time `json:"at"`
	Recorded   string    `json:"recorded,omitempty"`
	Version    string    `json:"version,omitempty"`
	Kubernetes string    `json:"kubernetes,omitempty"`
	Families   int       `json:"families"`
	Functions  int       `json:"pciFunctions,omitempty"`
	Asked      bool      `json:"holdersKnown"`

	Counts    []Count   `json:"counts"`    // by kind
	Devices   []*Device `json:"devices"`   // in the order of their places
	Holders   []Holder  `json:"holders"`   // in the order of pods
	Waiting   []Waiting `json:"waiting"`   // in the order of silicon
	Attention []Item    `json:"attention"` // worst first
	Gone      []Gone    `json:"gone"`
	Problems  []Problem `json:"problems"`
	Notes     []Note    `json:"notes,omitempty"`
	Tree      *Tree     `json:"tree"`

	byName map[string]*Device
}

// Device returns the device of that name, nil if there is none.
func (i *Inventory) Device(name string) *Device { return i.byName[name] }

// Count is how many devices of a kind there are. Free, Held and Out make All together; of
// parts and shares of one device each counts. What any number may have counts as Open alone.
type Count struct {
	Kind string `json:"kind"`
	All  int    `json:"all"`
	Free int    `json:"free"`
	Held int    `json:"held"`
	Out  int    `json:"out"` // neither: unhealthy, not readable, or about to move
	Open int    `json:"open,omitempty"`

	Devices     int `json:"devices"`     // whatever their shares, less those for any number
	FreeDevices int `json:"freeDevices"` // of which nobody has anything
}

// State says in one word how a device is, by what matters most of it.
type State string

// The states of a device. Present is that of one that is well where nobody was asked who
// has what.
const (
	Free      State = "free"
	Held      State = "held"
	Partly    State = "partly"    // some of its shares or of its parts are held
	Taken     State = "taken"     // held with the whole, or by other parts
	Moving    State = "moving"    // waits to move to the other API
	Degraded  State = "degraded"  // something is wrong, and it is given out
	Unhealthy State = "unhealthy" // given to nobody
	Unread    State = "unread"    // could not be read
	Open      State = "open"      // any number of pods may have it
	Present   State = "present"
)

// Device is one device with all that is said of it.
type Device struct {
	Name    string `json:"name"`
	Kind    string `json:"kind"`
	Family  string `json:"family"`
	Label   string `json:"label"`            // its model in short, or the name of the part
	Detail  string `json:"detail,omitempty"` // tells it from others of its model: an interface, a profile
	Model   string `json:"model,omitempty"`
	Profile string `json:"profile,omitempty"`
	Memory  int64  `json:"memoryBytes,omitempty"`
	Silicon string `json:"silicon"` // what it is a part of, or itself
	Index   int    `json:"index"`   // among the parts of its silicon
	Place   Place  `json:"place"`

	State   State          `json:"state"`
	Holding State          `json:"holding,omitempty"` // free, held, partly or taken, whatever its health; "" if nobody was asked
	Health  Health         `json:"health"`
	API     discovery.Mode `json:"api,omitempty"` // by which it is offered
	Open    bool           `json:"open,omitempty"`
	Unmade  bool           `json:"unmade,omitempty"` // it is not there yet: it is made when somebody gets it
	Shares  Shares         `json:"shares,omitzero"`
	Holders []Holder       `json:"holders,omitempty"`
	Move    *Move          `json:"move,omitempty"`
	Ask     Ask            `json:"ask"`

	// Offered is the device as it is in the snapshot.
	Offered *rules.Offered `json:"-"`
}

// Shares is how many may have a device together, and how many have.
type Shares struct {
	All  int `json:"all"`
	Held int `json:"held"`
}

// Place is where a device stands. Unknown fields are left out.
type Place struct {
	Path    string   `json:"path,omitempty"` // its directory in /sys
	Address string   `json:"pciAddress,omitempty"`
	NUMA    *int     `json:"numaNode,omitempty"`
	Root    string   `json:"pcieRoot,omitempty"`
	Bridges []string `json:"bridges,omitempty"` // from the root's port to the one above the device
	Speed   int64    `json:"linkSpeed,omitempty"`
	Width   int64    `json:"linkWidth,omitempty"`
}

// Health is the health of a device.
type Health struct {
	Status    discovery.HealthStatus        `json:"status"`
	Condition discovery.Condition           `json:"condition,omitempty"`
	Effect    resourceapi.DeviceTaintEffect `json:"effect,omitempty"` // what the condition means
	Reason    string                        `json:"reason,omitempty"`
	Since     time.Time                     `json:"since,omitzero"`
	Stale     bool                          `json:"stale,omitempty"` // the last scan could not read it
}

// Waiting is silicon that waits, with the devices on it.
type Waiting struct {
	Silicon string   `json:"silicon"`
	Devices []string `json:"devices"`
	Move
}

// Item is one thing that needs attention.
type Item struct {
	State   State               `json:"state"`
	Device  string              `json:"device"`
	Devices int                 `json:"devices"` // how many of the same silicon have the same
	Reason  string              `json:"reason"`
	Key     discovery.Condition `json:"condition,omitempty"`
	Effect  string              `json:"effect,omitempty"`
	Since   time.Time           `json:"since,omitzero"`
	Hit     []string            `json:"hit,omitempty"` // the pods that have it
}

// Gone is a device that somebody has and that is not there.
type Gone struct {
	Device string   `json:"device"`
	Health Health   `json:"health"`
	Hit    []string `json:"hit,omitempty"`
}

// Problem is what could not be read or understood.
type Problem struct {
	Device string `json:"device"`
	Error  string `json:"error"`
}

// Text returns the problem in words.
func (p Problem) Text() string { return p.Device + ": " + p.Error }
