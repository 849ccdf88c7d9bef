package discovery

// PathResource is an extended resource of the administrator, made from device nodes, files and USB
// devices of the host. Its JSON names are the names in the configuration.
type PathResource struct {
	Name   string            `json:"name"`           // "example.com/serial"
	Kind   string            `json:"kind,omitempty"` // the attribute, "other" if empty
	Env    map[string]string `json:"env,omitempty"`  // additional environment variables of the container
	Groups []PathGroup       `json:"groups"`
}

// PathGroup defines devices of the resource: each consists of a match of each of Paths, or of USB
// devices, or only of a number.
type PathGroup struct {
	Paths []HostPath `json:"paths,omitempty"`
	USB   []USBID    `json:"usb,omitempty"`

	// Each makes a device of a USB device per entry, as with paths. Otherwise all matches together
	// make a single device.
	Each bool `json:"each,omitempty"`

	// Count is the number of containers that may have a device at once; 0 means 1.
	Count int `json:"count,omitempty"`

	// Units is the number of devices of the group if the host does not show the number. Each unit has
	// all paths of the group, which must exist, but the group may have no paths. With 0, as many
	// devices are created as are found.
	Units int `json:"units,omitempty"`

	// UnitEnv is the environment variable with the numbers of the container's units, joined with
	// commas.
	UnitEnv string `json:"unitEnv,omitempty"`
}

// Unseen is the Source of units without a trace on the host: the units exist as long as the host
// does.
const Unseen = "sys"

// HostPath is a device node or a mounted path of the host.
type HostPath struct {
	Path string `json:"path"` // absolute; a pattern of [path.Match]

	// MountPath is the path in the container. If empty, MountPath is the path on the host. With a
	// slash at the end, MountPath is the directory for the file's own name.
	MountPath string `json:"mountPath,omitempty"`

	Permissions string `json:"permissions,omitempty"` // of a device node: "mrw" if empty
	Mount       bool   `json:"mount,omitempty"`       // a mount, not a device node
	ReadOnly    bool   `json:"readOnly,omitempty"`    // for a mount

	// Limit is the number of devices of the group that may share a match if other paths have more
	// matches; 0 means 1.
	Limit int `json:"limit,omitempty"`

	// Optional allows devices without a match of this path.
	Optional bool `json:"optional,omitempty"`
}

// USBID selects USB devices.
type USBID struct {
	Vendor  string `json:"vendor"`           // four lower-case hexadecimal digits
	Product string `json:"product"`          // the same
	Serial  string `json:"serial,omitempty"` // empty matches any
}
