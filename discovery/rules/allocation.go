package rules

import (
	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
)

// Allocation is how the device-plugin API gives out what a resource counts.
type Allocation struct {
	Policy Policy

	// One says that a container gets no more than one.
	One bool

	Lists  Lists
	Naming discovery.Naming

	// Env are variables that containers get besides: A=b. They do not take the place
	// of those that come with the devices.
	Env []string

	// Alike are attributes in which all devices of the resource must agree. If two do not,
	// none is offered under its name.
	Alike []resourceapi.QualifiedName
}

// Lists says how devices get into containers.
type Lists struct {
	Plain       bool // device nodes, mounts and variables
	Annotations bool // an annotation that names CDI devices
	CDIDevices  bool // the kubelet names CDI devices to the container runtime
}

// CDI reports whether the devices are named as CDI devices.
func (l Lists) CDI() bool { return l.Annotations || l.CDIDevices }

// Policy says which IDs of a resource are given together.
type Policy string

// The policies.
const (
	// PolicyAligned, the default, is devices that are near to each other, and shares
	// of those devices that have most of them left.
	PolicyAligned Policy = "Aligned"

	// PolicySpread is devices that are far from each other, and shares as of
	// PolicyAligned.
	PolicySpread Policy = "Spread"

	// PolicyPacked is devices that are near to each other, and shares of those
	// devices that have fewest of them left.
	PolicyPacked Policy = "Packed"
)
