package wire

import "k8s.io/apimachinery/pkg/types"

// Versions of the requests to the host service. The agent and the service work together if their
// ranges overlap. A request with a changed meaning needs a new version. The agent sends an added
// field only to a service that has the field's version, because a service refuses unknown fields:
// such a field may restrict the request.
const (
	OldestVersion = 1
	NewestVersion = 1
)

// Paths of the requests to the host service. Each session has the path of its ID below
// SessionsPath.
const (
	ServicePath       = "/service"
	SessionsPath      = "/sessions"
	WritePath         = "/write"
	PartitionsPath    = "/partitions"
	ConfigurePath     = "/configure"
	ProgramsPath      = "/programs"
	FunctionUsersPath = "/users/functions"
	PodUsersPath      = "/users/pods"
)

// ErrnoHeader is the header of a failed write with the number of the kernel's error.
const ErrnoHeader = "Chandler-Errno"

// EndHeader is the trailer of a program's output with the reason for the program's end.
const EndHeader = "Chandler-End"

// Service describes a host service.
type Service struct {
	Program string `json:"program"` // the version of the program
	Oldest  int    `json:"oldest"`  // the oldest version of the protocol that the service has
	Newest  int    `json:"newest"`

	// Attributes are the attributes that the service may write on this node.
	Attributes []string `json:"attributes"`

	// Programs are the programs that the service may run on this node.
	Programs []string `json:"programs,omitempty"`

	// HiddenFromPods is why the service does not see the open files of the pods' processes, "" if it
	// sees them. HiddenFromAll is the same for all processes of the machine.
	HiddenFromPods string `json:"hiddenFromPods,omitempty"`
	HiddenFromAll  string `json:"hiddenFromAll,omitempty"`
}

// Write is the write of an attribute of a PCI function, or of a PCI driver for a function. It
// contains no path.
type Write struct {
	Session string `json:"session"` // the ID of the agent's session
	Lease   string `json:"lease"`   // the name of the agent's lease on the function

	Function string `json:"function"` // the address of the function
	Inode    uint64 `json:"inode"`    // the inode number of the function's directory in sysfs under the lease

	Attribute string `json:"attribute"`       // "driver_override", or "bind" of a driver
	Driver    string `json:"driver,omitzero"` // the driver, for "bind" and "unbind"

	// Value is the value of an attribute of the function. It is empty for attributes of drivers, whose
	// value is the address of the function.
	Value string `json:"value,omitzero"`
}

// PartitionChange is the creation or the removal of a partition of a PCI function, such as a MIG
// instance. It contains no argument of a program.
type PartitionChange struct {
	Session string `json:"session"` // as in Write
	Lease   string `json:"lease"`

	Function string `json:"function"`
	Inode    uint64 `json:"inode"`

	Program  string `json:"program"`           // the name of the program that makes the change: "nvml"
	Place    string `json:"place"`             // the profile of the partition and its first slice: "1g.10gb@4"
	Remove   bool   `json:"remove,omitzero"`   // removes the partition; otherwise, it is created
	UUID     string `json:"uuid,omitzero"`     // removes the partition only if this is its UUID
	HasBegun bool   `json:"hasBegun,omitzero"` // an agent has started the same change before
}

// Configuration gives a device of a PCI function the parameters of a claim, such as the accelerator
// function of an FPGA. It contains no path: the device's family finds the device and its files.
type Configuration struct {
	Session string `json:"session"` // as in Write
	Lease   string `json:"lease"`

	Function string `json:"function"`
	Inode    uint64 `json:"inode"`

	Family     string            `json:"family"` // the family of the device: "fpga-intel"
	Device     string            `json:"device"` // the name of the device: "pci-0000-17-00-0-port-0"
	Parameters map[string]string `json:"parameters"`
}

// Output is the output of a program that has made a change.
type Output struct {
	Text    string `json:"text"`
	Warning string `json:"warning,omitzero"`
}

// Node is a device node of the host.
type Node struct {
	Path  string `json:"path"`
	Block bool   `json:"block,omitempty"`
	Major int64  `json:"major"`
	Minor int64  `json:"minor"`
}

// FunctionQuery asks for the users of PCI functions, or of other kernel devices. The answer is a list of [Use] lists, in the
// order of the functions.
type FunctionQuery struct {
	Functions []Device    `json:"functions"`
	Except    []types.UID `json:"except,omitempty"` // the pods whose processes are ignored
}

// Device is a kernel device, with nodes that the kernel does not show below the device.
type Device struct {
	Source string `json:"source,omitempty"` // its directory, as in fs.FS, below sys/devices
	Nodes  []Node `json:"nodes,omitempty"`
}

// PodQuery asks for processes of pods that have a device open. The answer is a list of [Use]
// values.
type PodQuery struct {
	// Device is the device: its PCI function if Source is set, and its nodes.
	Device Device      `json:"device"`
	Pods   []types.UID `json:"pods,omitempty"`

	// Unlisted means all pods except Pods.
	Unlisted bool `json:"unlisted,omitempty"`
}

// Use is one way in which a function or a device is in use, or may be; see inuse.Use.
type Use struct {
	Object       string `json:"object"`
	How          string `json:"how,omitempty"`
	BlocksUnbind bool   `json:"blocksUnbind,omitempty"`
	ReadError    string `json:"readError,omitempty"`
	Forbidden    bool   `json:"forbidden,omitempty"` // ReadError is a lack of permission
}
