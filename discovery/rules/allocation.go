package rules

import (
	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
)

// Allocation configures how the device plugin API allocates the IDs of a resource.
type Allocation struct {
	Policy Policy

	// One limits a container to one ID.
	One bool

	Lists  Lists
	Naming discovery.Naming

	// Env lists additional environment variables for containers: A=b. They do not override the
	// variables of the devices.
	Env []string

	// MatchAttributes lists attributes that must be equal for all devices of the resource. If two devices
	// differ, no device is offered under the resource name.
	MatchAttributes []resourceapi.QualifiedName
}

// Lists selects the ways of adding devices to containers.
type Lists struct {
	Plain       bool // device nodes, mounts and environment variables
	Annotations bool // an annotation with the names of CDI devices
	CDIDevices  bool // the kubelet passes the names of CDI devices to the container runtime
}

// UsesCDI reports whether containers get CDI device names.
func (l Lists) UsesCDI() bool { return l.Annotations || l.CDIDevices }

// Policy selects the IDs of a resource that are allocated together.
type Policy string

// The policies.
const (
	// PolicyAligned, the default, prefers devices close to each other, and shares of the devices
	// with the most free shares.
	PolicyAligned Policy = "Aligned"

	// PolicySpread prefers devices far from each other, and shares like PolicyAligned.
	PolicySpread Policy = "Spread"

	// PolicyPacked prefers devices close to each other, and shares of the devices with the fewest
	// free shares.
	PolicyPacked Policy = "Packed"
)
