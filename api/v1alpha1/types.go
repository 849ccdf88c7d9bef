// Package v1alpha1 is what users write: the configuration of the agent and
// the parameters of a claim. It holds types, defaults and validation, and no
// behaviour.
package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// APIVersion is the API group and version of every type in this package.
const APIVersion = "chandler.dev/v1alpha1"

// The kinds of this package.
const (
	KindDriverConfig    = "DriverConfig"
	KindClaimParameters = "ClaimParameters"
)

// DriverConfig is the configuration of the agent on a node, in the file that
// its --config names. Every field may be left out.
type DriverConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Mode is the API that offers devices for which no resource says another:
	// Auto (the default), DRA or DevicePlugin.
	Mode Mode `json:"mode,omitempty"`

	// Exclude are devices that are offered to nobody.
	Exclude []Selector `json:"exclude,omitempty"`

	// Sharing lets several containers have one device. The first that selects
	// a device counts.
	Sharing []Sharing `json:"sharing,omitempty"`

	// Resources rename devices in the classic API, or choose the API that
	// offers them. The first that selects a device counts.
	Resources []Resource `json:"resources,omitempty"`

	// Roots are directories of the host in which a family may look for its
	// vendor's libraries or bitstreams, by the family's name:
	//	roots: {nvidia: /run/nvidia/driver}
	Roots map[string]string `json:"roots,omitempty"`
}

// Mode is an API that offers devices.
type Mode string

// The modes.
const (
	// ModeAuto is DRA where the cluster has it and the device-plugin API elsewhere.
	ModeAuto         Mode = "Auto"
	ModeDRA          Mode = "DRA"
	ModeDevicePlugin Mode = "DevicePlugin"
)

// Selector selects devices.
type Selector struct {
	// CEL is an expression over "device", as in a DeviceClass:
	//	device.attributes["chandler.dev"].kind == "gpu"
	// A device that lacks an attribute which the expression reads is not
	// selected, and is reported; write ?.name.orValue("") to allow for that.
	CEL string `json:"cel"`
}

// Sharing is how containers share each of the selected devices: by number
// (Replicas) or by units of a capacity (Unit). What they do with it, they do
// together: nothing keeps one from using what another asked for, unless the
// device or its vendor's software does.
type Sharing struct {
	Selector `json:",inline"`

	// Resource is the classic name of the shares, such as aliyun.com/gpu-mem.
	// It may be left out with Replicas: the shares then have the devices' name.
	Resource string `json:"resource,omitempty"`

	// Replicas is how many containers may have a device at once. In DRA each
	// takes one of so many of the capacity "shares".
	Replicas int `json:"replicas,omitempty"`

	// Pool says that a container gets all of the selected devices, and that
	// there are Replicas of all of them together. It is for the device-plugin
	// API; a claim asks for as many devices as it wants.
	Pool bool `json:"pool,omitempty"`

	// Unit is how much one unit is, 1Gi. In the device-plugin API a container
	// asks for a number of units, all of one device; in DRA a claim asks for an
	// amount, which is rounded up to units, and without one for all.
	Unit *resource.Quantity `json:"unit,omitempty"`

	// Capacity is what the units are of: memory (the default), cores, or
	// another capacity of the devices.
	Capacity string `json:"capacity,omitempty"`
}

// Resource is how the selected devices are offered.
type Resource struct {
	Selector `json:",inline"`

	// Name is their name in the classic API, in place of the family's own:
	// example.com/gpu-large.
	Name string `json:"name"`

	// Mode is the API that offers them; left out, it is the configuration's.
	Mode Mode `json:"mode,omitempty"`
}

// ClaimParameters are what a ResourceClaim or a DeviceClass may say to
// Chandler, as opaque configuration of the driver chandler.dev, for one
// request or for all. What the claim says counts against what its class says.
// A parameter that a device of the request does not take is refused, so that a
// claim is never half obeyed. None names a path, a mount or a hook of the host.
type ClaimParameters struct {
	metav1.TypeMeta `json:",inline"`

	// InterfaceName is what the network interface of the device is called in
	// the container, which it is moved into: "net1". At most 15 characters.
	InterfaceName string `json:"interfaceName,omitempty"`

	// AcceleratorFunction is the function that an FPGA is to be programmed
	// with, by the ID that its maker gave it: 8 to 40 hexadecimal digits, in
	// which dashes do not count.
	AcceleratorFunction string `json:"acceleratorFunction,omitempty"`
}
