// Package inventory describes the devices of a machine: their position, health, consumers and
// pending moves. It is pure: one function makes an [Inventory] from a snapshot and the allocations.
// The terminal, the web UI and -o json show the same inventory.
package inventory

import (
	"cmp"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pciids"
	"chandler.dev/discovery/rules"
)

// Facts are the input of an inventory. They are only read.
type Facts struct {
	Name       string // of the machine
	Version    string // of this program
	Kubernetes string // the server's version, or ""
	Recorded   string // name of the recorded host, "" for a live machine
	Families   int    // number of families that examined the host
	Functions  int    // PCI functions of the host, 0 if they were not counted

	Snapshot *rules.Snapshot // with settled health if an agent has settled it
	Products pciids.Names    // of devices whose model the kernel does not know

	// ConsumersKnown means that the consumers are known. Otherwise Holders and Moves are empty, and no
	// device counts as free.
	ConsumersKnown bool
	Holders        []Holder

	API   map[string]discovery.Mode // the offering API, by physical device
	Moves map[string]Move           // pending moves, by physical device

	Notes []Note // problems of the node as a whole

	Classes []Class // DeviceClasses for claims

	// Installed reports whether the cluster has a DeviceClass. Nil means that this is unknown, and
	// that claims can use all Classes.
	Installed func(class string) bool

	At time.Time // time of the facts
}

// Holder is the allocation of one device to a container.
type Holder struct {
	Device    string         `json:"device"`
	API       discovery.Mode `json:"api"`
	Namespace string         `json:"namespace,omitempty"`
	Pod       string         `json:"pod,omitempty"`       // "" until the kubelet lists it
	Container string         `json:"container,omitempty"` // "" until the kubelet lists it
	Claim     string         `json:"claim,omitempty"`     // its name, or its UID if the name is unknown
	Request   string         `json:"request,omitempty"`   // of the claim
	Resource  string         `json:"resource,omitempty"`  // in the limits of the pod
	Since     time.Time      `json:"since,omitzero"`
}

// Owner returns a short name of the consumer: the pod, or otherwise the claim.
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

// ResourceOrClaim returns the resource in the pod's limits, or otherwise the claim. If DRA serves
// the limits, the scheduler creates a claim, whose generated name means nothing to users.
func (h *Holder) ResourceOrClaim() string { return cmp.Or(h.Resource, h.Claim) }

// Move is a pending move or change of a physical device.
type Move struct {
	To     discovery.Mode `json:"to,omitempty"` // the target API, "" for another change
	Reason string         `json:"reason"`       // in words
	For    []string       `json:"for,omitempty"`
	Since  time.Time      `json:"since,omitzero"`
}

// Note is a problem of the node as a whole rather than of one device.
type Note struct {
	Name   string    `json:"name"` // the problem, in a word or two
	Reason string    `json:"reason"`
	Code   string    `json:"code,omitempty"` // code of chandler doctor
	Since  time.Time `json:"since,omitzero"`
}

// Class is a DeviceClass.
type Class struct {
	Name      string           `json:"name"`
	Resource  string           `json:"resource,omitempty"` // its extended resource
	Selectors []rules.Selector `json:"-"`                  // all must select a device
	Length    int              `json:"-"`                  // of the expressions: the longest is the most specific
}

// Inventory contains a machine's devices at one moment. It is never modified. Its JSON is complete,
// and stable as described in docs/inventory.md.
type Inventory struct {
	Host           string    `json:"host"`
	At             time.Time `json:"at"`
	Recorded       string    `json:"recorded,omitempty"`
	Version        string    `json:"version,omitempty"`
	Kubernetes     string    `json:"kubernetes,omitempty"`
	Families       int       `json:"families"`
	Functions      int       `json:"pciFunctions,omitempty"`
	ConsumersKnown bool      `json:"consumersKnown"`

	Counts    []Count   `json:"counts"`    // by kind
	Devices   []*Device `json:"devices"`   // in the order of the tree
	Holders   []Holder  `json:"consumers"` // in the order of pods
	Waiting   []Waiting `json:"waiting"`   // in the order of physical devices
	Attention []Item    `json:"attention"` // worst first
	Gone      []Gone    `json:"gone"`
	Problems  []Problem `json:"problems"`
	Notes     []Note    `json:"notes,omitempty"`
	Tree      *Tree     `json:"tree"`

	byName map[string]*Device
}

// Device returns the device of that name, or nil.
func (i *Inventory) Device(name string) *Device { return i.byName[name] }

// Count is the number of devices of a kind. Partitions have the kind of their physical device. All is
// the sum of Free, Held and Out. Each partition and each share of a device is counted, except devices
// with unlimited sharing, which are counted in Open.
type Count struct {
	Kind string `json:"kind"`
	All  int    `json:"total"`
	Free int    `json:"free"`
	Held int    `json:"allocated"`
	Out  int    `json:"unavailable"` // unavailable: unhealthy, unreadable, or about to move
	Open int    `json:"shareable,omitempty"`

	Physical    int `json:"physicalDevices"` // a device counts once with all its partitions and virtual functions
	Devices     int `json:"devices"`         // devices without regard to shares; those of unlimited sharing only if they have a position
	Listed      int `json:"listedDevices"`   // these, and whole devices that can be allocated instead of their partitions
	FreeDevices int `json:"freeDevices"`     // of devices, those without any allocation and without unlimited sharing
}

// State is the most important state of a device.
type State string

// The states of a device. Present is the state of a healthy device if the consumers are unknown.
const (
	Free      State = "free"
	Held      State = "allocated"
	Partly    State = "partlyAllocated" // some of its shares or partitions are allocated
	Taken     State = "blocked"         // allocated with the whole, or blocked by other partitions
	Moving    State = "moving"          // waits to move to the other API
	Degraded  State = "degraded"        // has a problem, and can be allocated
	Unhealthy State = "unhealthy"       // cannot be allocated
	Unread    State = "unreadable"      // could not be read
	Open      State = "shareable"       // unlimited sharing
	Present   State = "present"
)

// Device is one device with all of its data.
type Device struct {
	Name    string `json:"name"`
	Kind    string `json:"kind"`
	Family  string `json:"family"`
	Label   string `json:"label"`            // short model, or the name of the partition
	Detail  string `json:"detail,omitempty"` // distinguishes it from others of its model: an interface, a profile
	Model   string `json:"model,omitempty"`
	Profile string `json:"profile,omitempty"`
	Memory  int64  `json:"memoryBytes,omitempty"`
	Silicon string `json:"physicalDevice"` // the physical device of a partition, or the device itself
	Index   int    `json:"index"`          // among the partitions of the physical device
	Place   Place  `json:"place"`

	State     State          `json:"state"`
	Holding   State          `json:"allocation,omitempty"` // free, held, partly or taken, whatever its health; "" if the consumers are unknown
	Health    Health         `json:"health"`
	API       discovery.Mode `json:"api,omitempty"` // the offering API
	Open      bool           `json:"shareable,omitempty"`
	Uncreated bool           `json:"notCreated,omitempty"` // does not exist yet, and is created on demand
	Shares    Shares         `json:"shares,omitzero"`
	Holders   []Holder       `json:"consumers,omitempty"`
	Move      *Move          `json:"move,omitempty"`
	Ask       Ask            `json:"request"`

	// Offered is the device in the snapshot.
	Offered *rules.Offered `json:"-"`
}

// Shares is the number of a device's shares, and of the allocated ones.
type Shares struct {
	All  int `json:"total"`
	Held int `json:"allocated"`
}

// Place is the position of a device. Unknown fields are omitted.
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
	Effect    resourceapi.DeviceTaintEffect `json:"effect,omitempty"` // of the condition
	Reason    string                        `json:"reason,omitempty"`
	Since     time.Time                     `json:"since,omitzero"`
	Stale     bool                          `json:"stale,omitempty"` // the last scan could not read the device
}

// Waiting is a physical device with a pending move, and its devices.
type Waiting struct {
	Silicon string   `json:"physicalDevice"`
	Devices []string `json:"devices"`
	Move
}

// Item is one problem or pending move.
type Item struct {
	State   State               `json:"state"`
	Device  string              `json:"device"`
	Devices int                 `json:"devices"` // number of devices of the same physical device with this item
	Reason  string              `json:"reason"`
	Key     discovery.Condition `json:"condition,omitempty"`
	Effect  string              `json:"effect,omitempty"`
	Since   time.Time           `json:"since,omitzero"`
	Hit     []string            `json:"affectedConsumers,omitempty"` // the pods that have the device
}

// Gone is an allocated device that has vanished.
type Gone struct {
	Device string   `json:"device"`
	Health Health   `json:"health"`
	Hit    []string `json:"affectedConsumers,omitempty"`
}

// Problem is a read or parse error.
type Problem struct {
	Device  string `json:"device"`
	Setting string `json:"setting,omitempty"` // the part of the configuration that cannot be applied to the device
	Error   string `json:"error"`
}

// Text returns the problem in words.
func (p Problem) Text() string { return p.Device + ": " + p.Error }
