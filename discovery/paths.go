package discovery

// PathResource is what the administrator offers under one classic name: device
// nodes, files and USB devices of the host. Its names are those of the
// configuration.
type PathResource struct {
	Name   string            `json:"name"`           // "example.com/serial"
	Kind   string            `json:"kind,omitempty"` // the attribute, "other" if empty
	Env    map[string]string `json:"env,omitempty"`  // what a container gets besides
	Groups []PathGroup       `json:"groups"`
}

// PathGroup says what makes one device of the resource: something of each of
// its Paths, or USB devices, or no more than a number.
type PathGroup struct {
	Paths []HostPath `json:"paths,omitempty"`
	USB   []USBID    `json:"usb,omitempty"`

	// Each says that one USB device of each entry makes a device, as with
	// paths. Else all that match make one.
	Each bool `json:"each,omitempty"`

	// Count is how many containers may have each device at once; 0 is 1.
	Count int `json:"count,omitempty"`

	// Units is how many devices the group is where that cannot be seen: all that
	// it names is in each of them, and must be there, but it may name nothing.
	// 0 is as many as are found.
	Units int `json:"units,omitempty"`

	// UnitEnv is the variable that holds the numbers of the units which a
	// container has, joined with commas.
	UnitEnv string `json:"unitEnv,omitempty"`
}

// Unseen is the Source of units of which nothing on the host can be seen: they
// last as long as the host.
const Unseen = "sys"

// HostPath is a device node, or what is mounted, of the host.
type HostPath struct {
	Path string `json:"path"` // absolute; a pattern of [path.Match]

	// MountPath is where it is in the container: as on the host if empty, and
	// in that directory under its own name if it ends in a slash.
	MountPath string `json:"mountPath,omitempty"`

	Permissions string `json:"permissions,omitempty"` // of a device node: "mrw" if empty
	Mount       bool   `json:"mount,omitempty"`       // it is mounted, and no device node
	ReadOnly    bool   `json:"readOnly,omitempty"`    // how it is mounted

	// Limit is how many devices of the group may have the same match, where
	// other paths have more; 0 is 1.
	Limit int `json:"limit,omitempty"`

	// Optional says that the devices do without where nothing matches.
	Optional bool `json:"optional,omitempty"`
}

// USBID selects USB devices.
type USBID struct {
	Vendor  string `json:"vendor"`           // four lower-case hexadecimal digits
	Product string `json:"product"`          // the same
	Serial  string `json:"serial,omitempty"` // any if empty
}
