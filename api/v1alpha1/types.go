// Package v1alpha1 is what users write: the configuration of the agents, that of a
// host's PCI functions, and the parameters of a claim. It holds types, defaults,
// validation, and which entries count on which node. It does nothing with them.
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
	KindProvisionConfig = "ProvisionConfig"
)

// DriverConfig is the configuration of the agents, in the file that their --config
// names. Every field may be left out. Entries of lists may be for some nodes only.
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

	// Allocation is how the device-plugin API gives out what a resource counts.
	// If several entries of one resource count on a node, the first does.
	Allocation []Allocation `json:"allocation,omitempty"`

	// Rebinding are PCI functions that claims and resources may have as vfio, by
	// driver. While somebody has one so, it is taken from its kernel driver. The agent
	// needs privileges for it, and a change takes effect at its next start. The first that
	// selects a device counts.
	Rebinding []Rebinding `json:"rebinding,omitempty"`

	// Handover is what is done to devices between two owners. The agent needs privileges
	// for it. The first that selects a device counts.
	Handover []Handover `json:"handover,omitempty"`

	// OnRequest are devices that are made when claims or resources get them, and undone when
	// nobody has them any more. The agent needs privileges for it, and a change of all but
	// keepSeconds takes effect at its next start.
	OnRequest OnRequest `json:"onRequest,omitzero"`

	// Overhead is what users of devices need of the host's own CPU and memory.
	// The first that selects a device counts.
	Overhead []Overhead `json:"overhead,omitempty"`

	// Roots are directories of the host in which a family may look for what its
	// vendor's software has there, libraries or bitstreams, by the family's name, or
	// that with a suffix:
	//	roots: {nvidia: /run/nvidia/driver, nvidia-mps: /run/nvidia/mps}
	Roots map[string]string `json:"roots,omitempty"`

	// Paths are device nodes, files and USB devices of the host that are
	// offered because they are named here.
	Paths []PathResource `json:"paths,omitempty"`

	// Hooks says whether container runtimes are to call the agent's program for a
	// container that gets devices: for example, to have its loader find a vendor's
	// libraries. Left out, it is Auto.
	Hooks Hooks `json:"hooks,omitempty"`

	// Health says what it means for pods that a device is not well.
	Health Health `json:"health,omitzero"`
}

// Hooks says whether CDI specs have hooks.
type Hooks string

// The choices for hooks.
const (
	// HooksAuto gives hooks to devices that are better used with them.
	HooksAuto Hooks = "Auto"

	// HooksNone gives none to any device, for container runtimes that forbid them.
	HooksNone Hooks = "None"
)

// Health says what follows from the health of devices.
type Health struct {
	// Severity gives conditions, by their names, another effect than the one that
	// the documentation says:
	//	severity: {over-temperature: NoExecute, link-degraded: NoSchedule}
	Severity map[string]Effect `json:"severity,omitempty"`
}

// Effect is what a condition of a device means for pods: that of its taint in
// DRA.
type Effect string

// The effects. In the device-plugin API, which evicts nobody, NoExecute is as
// NoSchedule.
const (
	EffectNone       Effect = "None"       // the condition is reported, and nothing else happens
	EffectNoSchedule Effect = "NoSchedule" // no new pod gets the device
	EffectNoExecute  Effect = "NoExecute"  // pods that have it are evicted as well
)

// Mode is an API that offers devices.
type Mode string

// The modes.
const (
	// ModeAuto is DRA where the cluster has it and the device-plugin API elsewhere.
	ModeAuto         Mode = "Auto"
	ModeDRA          Mode = "DRA"
	ModeDevicePlugin Mode = "DevicePlugin"
)

// Selector selects devices on the nodes on which it counts.
type Selector struct {
	// CEL is an expression over "device", as in a DeviceClass:
	//	device.attributes["chandler.dev"].kind == "gpu"
	// A device that lacks an attribute which the expression reads is not
	// selected, and is reported. To allow for that, write .?name.orValue("").
	CEL string `json:"cel"`

	// Nodes are the nodes on which the entry counts, all if they are left out.
	Nodes *Nodes `json:"nodes,omitempty"`
}

// Sharing is how containers share each of the selected devices: by number
// (Replicas) or by units of a capacity (Unit). They share the device freely:
// nothing keeps one from using what another asked for, unless the device or its
// vendor's software does.
type Sharing struct {
	Selector `json:",inline"`

	// Resource is the classic name of the shares, such as aliyun.com/gpu-mem. Where
	// several entries have one, their shares are alike.
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
	// amount, which is rounded up to units, and without one for all. A resource has
	// as many units as the kubelet takes in a list of 4 MiB.
	Unit *resource.Quantity `json:"unit,omitempty"`

	// Capacity is the capacity that the units count: memory (the default), cores, or
	// another one of the devices.
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

	// AcceleratorFunction is the function that FPGAs are programmed with before
	// the classic API lists them under that name, as in [ClaimParameters]. In
	// DRA a claim says which one it wants.
	AcceleratorFunction string `json:"acceleratorFunction,omitempty"`

	// Driver is vfio for devices that are given to a vfio driver before the classic API
	// lists them under that name, as in [ClaimParameters]. They must be among those of
	// rebinding, or be under vfio already.
	Driver DriverKind `json:"driver,omitempty"`

	// SRIOV makes the entry a pool of the SR-IOV network device plugin. PCI functions
	// under vfio then have their addresses as IDs, and containers the variables
	// PCIDEVICE_<PREFIX>_<NAME>, where otherwise they have what KubeVirt has: IOMMU
	// groups, and PCI_RESOURCE_<NAME>. It may be empty: {}.
	SRIOV *SRIOVPool `json:"sriov,omitempty"`
}

// SRIOVPool has the settings that only a pool of the SR-IOV network device plugin has.
type SRIOVPool struct {
	// AdditionalInfo is what PCIDEVICE_<PREFIX>_<NAME>_INFO says of devices as
	// "extra", by their IDs. "*" stands for all devices; an entry for one device
	// takes its place.
	AdditionalInfo map[string]map[string]string `json:"additionalInfo,omitempty"`

	// NeedVhostNet gives containers /dev/vhost-net and /dev/net/tun too.
	NeedVhostNet bool `json:"needVhostNet,omitempty"`

	// ExcludeTopology keeps the devices' NUMA nodes from the kubelet.
	ExcludeTopology bool `json:"excludeTopology,omitempty"`
}

// DriverKind is a kind of kernel driver under which a device is given out.
type DriverKind string

// The kinds.
const (
	// DriverVFIO gives a PCI function to a vfio driver, for a virtual machine or a program
	// in user space.
	DriverVFIO DriverKind = "vfio"
)

// Allocation is how the device-plugin API gives out what a classic resource counts:
// devices, or shares of them. The scheduler counts no more than numbers; which ones a
// container gets is decided on the node.
type Allocation struct {
	// Resource is the classic name: nvidia.com/gpu.
	Resource string `json:"resource"`

	// Nodes are the nodes on which the entry counts, all if they are left out.
	Nodes *Nodes `json:"nodes,omitempty"`

	// Policy says which of them a container gets together: Aligned (the default),
	// Spread or Packed.
	Policy Policy `json:"policy,omitempty"`

	// FailRequestsGreaterThanOne refuses containers that ask for more than one. It
	// is for shares: two of them may be of one device, and then give no more than one
	// does.
	FailRequestsGreaterThanOne bool `json:"failRequestsGreaterThanOne,omitempty"`

	// DeviceListStrategy says how containers get the devices; several may go
	// together. Left out, it is EnvVar, and CDIDevices for devices that need it.
	DeviceListStrategy []DeviceListStrategy `json:"deviceListStrategy,omitempty"`

	// DeviceIDStrategy says how devices are named to NVIDIA's container runtime: UUID
	// (the default) or Index.
	DeviceIDStrategy DeviceIDStrategy `json:"deviceIDStrategy,omitempty"`

	// Env are variables that containers with such a device get besides, for container
	// runtimes: {NVIDIA_GDS: enabled}. The variables that come with the devices
	// override them.
	Env map[string]string `json:"env,omitempty"`

	// Alike are attributes of which all devices of the resource must have the same value on a
	// node, or none: [function, profile]. If two differ, the node offers none under that name,
	// and the agent says which two.
	Alike []string `json:"alike,omitempty"`
}

// DeviceIDStrategy is how devices are named to NVIDIA's container runtime.
type DeviceIDStrategy string

// The strategies.
const (
	DeviceIDUUID  DeviceIDStrategy = "UUID"  // by their UUIDs
	DeviceIDIndex DeviceIDStrategy = "Index" // by NVML's numbers, where chandler-nvml tells them
)

// DeviceListStrategy is a way for devices to get into containers.
type DeviceListStrategy string

// The strategies.
const (
	// ListEnvVar has the kubelet pass the container device nodes, mounts and
	// variables. One of these names the devices to NVIDIA's container runtime.
	ListEnvVar DeviceListStrategy = "EnvVar"

	// ListVolumeMounts is as EnvVar, and names the devices to NVIDIA's container
	// runtime by mounts, which a container cannot make for itself.
	ListVolumeMounts DeviceListStrategy = "VolumeMounts"

	// ListCDIAnnotations names CDI devices in an annotation, for container runtimes
	// that read it. It works with any kubelet.
	ListCDIAnnotations DeviceListStrategy = "CDIAnnotations"

	// ListCDIDevices has the kubelet name CDI devices to the container runtime. It
	// needs Kubernetes 1.29.
	ListCDIDevices DeviceListStrategy = "CDIDevices"
)

// Policy says which devices and shares a container gets together.
type Policy string

// The policies. How near devices are is known by what is on the hardware: parts of
// one device, private links, PCIe switches and roots, NUMA nodes.
const (
	// PolicyAligned gives devices that are near to each other, and leaves neighbours
	// to those who come later. Shares are of the devices that have most of them left.
	PolicyAligned Policy = "Aligned"

	// PolicySpread gives devices that are far from each other. Shares are as with
	// Aligned.
	PolicySpread Policy = "Spread"

	// PolicyPacked gives devices as Aligned does. Shares are of the devices that have
	// fewest of them left, so that others stay free.
	PolicyPacked Policy = "Packed"
)

// Overhead is what a pod needs of the node for each of the selected devices that
// it has, beside what its containers ask for: the host memory of a GPU's
// driver, the CPU time of who polls a queue. The scheduler charges the pod with
// it, and the kubelet lets the pod have it, where DRA offers the device and the
// cluster has the feature gate DRANodeAllocatableResources (KEP-5517). Elsewhere
// nothing is charged.
type Overhead struct {
	Selector `json:",inline"`

	// PerPod is needed once by each pod, {memory: 512Mi}, and PerContainer again
	// by each container that names the claim. They are of cpu, memory, or huge
	// pages of a size: hugepages-2Mi.
	PerPod       map[string]resource.Quantity `json:"perPod,omitempty"`
	PerContainer map[string]resource.Quantity `json:"perContainer,omitempty"`
}

// PathResource is what is offered under one name. In DRA the name is the
// attribute "resource" of the devices.
type PathResource struct {
	// Name is the classic name, which is there once on each node:
	// example.com/serial. At most 64 characters.
	Name string `json:"name"`

	// Nodes are the nodes on which the entry counts, all if they are left out.
	Nodes *Nodes `json:"nodes,omitempty"`

	// Kind is the attribute "kind" of the devices; left out, it is "other".
	Kind string `json:"kind,omitempty"`

	// Env are variables that each container with such a device gets.
	Env map[string]string `json:"env,omitempty"`

	// Groups say what makes the devices.
	Groups []PathGroup `json:"groups"`
}

// PathGroup makes devices of either paths or USB devices, or of a number.
type PathGroup struct {
	// Paths are what each device consists of: the first device of the first
	// match of each, the second of the second. There are as many devices as the
	// path with the most matches has, or as the scarcest lasts for.
	Paths []Path `json:"paths,omitempty"`

	// USB are USB devices by their vendor and product. All that match make one
	// device. With Each, one of each entry does.
	USB []USBDevice `json:"usb,omitempty"`

	// Each makes a device of one USB device for each entry, and as many as there are
	// such sets, as KubeVirt does.
	Each bool `json:"each,omitempty"`

	// Count is how many containers may have each device at once: 1 (the
	// default) to 4096.
	Count int `json:"count,omitempty"`

	// Units is how many devices there are, at most 1024, where nothing on the
	// host tells: each has all that is found of what the group names, and there
	// is none where that is not found. Of a group that names nothing there is
	// none either while another family offers devices of the same kind. A group with Units may name nothing. In the
	// device-plugin API their IDs are their numbers, from 0.
	Units int `json:"units,omitempty"`

	// UnitEnv is a variable for the numbers of the units that a container has,
	// with commas between: ACCELERATOR_UNITS.
	UnitEnv string `json:"unitEnv,omitempty"`
}

// Path is a device node of the host, or what is mounted from it. The agent must
// see it: what is not in /dev must be mounted into its pod.
type Path struct {
	// Path is absolute, and may be a pattern: /dev/ttyUSB*. A directory stands
	// for all device nodes below it.
	Path string `json:"path"`

	// MountPath is the path in the container, the same as on the host if left
	// out. One that ends in a slash is the directory that it lies in there.
	MountPath string `json:"mountPath,omitempty"`

	// Permissions are what a container may do with a device node: read (r),
	// write (w), and make nodes for it (m). Left out, they are mrw.
	Permissions string `json:"permissions,omitempty"`

	// Type is Device (the default) or Mount.
	Type PathType `json:"type,omitempty"`

	// ReadOnly says how a Mount is mounted.
	ReadOnly bool `json:"readOnly,omitempty"`

	// Limit is how many devices of the group may have the same match, 1 if left
	// out, where other paths of the group have more.
	Limit int `json:"limit,omitempty"`

	// Optional says that devices do without this path where it matches nothing.
	Optional bool `json:"optional,omitempty"`
}

// PathType says how a path gets into a container.
type PathType string

// The types of paths.
const (
	PathTypeDevice PathType = "Device"
	PathTypeMount  PathType = "Mount"
)

// USBDevice selects USB devices.
type USBDevice struct {
	// Vendor and Product are the IDs, up to four hexadecimal digits. They must
	// be quoted where YAML takes them for a number: "1209".
	Vendor  string `json:"vendor"`
	Product string `json:"product"`

	// Serial is the serial number; left out, it may be any.
	Serial string `json:"serial,omitempty"`
}

// ClaimParameters are what a ResourceClaim or a DeviceClass may say to
// Chandler, as opaque configuration of the driver chandler.dev, for one
// request or for all. A claim overrides its class. A parameter that a device of
// the request does not take is refused, so that a claim is never half obeyed. None
// names a path, a mount or a hook of the host.
type ClaimParameters struct {
	metav1.TypeMeta `json:",inline"`

	// InterfaceName is what the network interface of the device is called in
	// the container, which it is moved into: "net1". At most 15 characters.
	InterfaceName string `json:"interfaceName,omitempty"`

	// AcceleratorFunction is the function that an FPGA is to be programmed
	// with, by the ID that its maker gave it: 8 to 40 hexadecimal digits, in
	// which dashes do not count.
	AcceleratorFunction string `json:"acceleratorFunction,omitempty"`

	// Driver is vfio for PCI functions that are wanted under a vfio driver, for a virtual
	// machine or a program in user space. The administrator must let them be rebound. They
	// go back to their own driver when the claim has ended. No other parameter goes with it.
	Driver DriverKind `json:"driver,omitempty"`

	// Environment are variables by which the device's own libraries are tuned
	// in the containers that get it: {HSA_XNACK: "1"}. Which there are depends on
	// the device's family. For a variable that both set, the claim overrides its
	// class. At most 32 C identifiers of up to 64 characters, each with 1 to 256
	// printable ASCII characters.
	Environment map[string]string `json:"environment,omitempty"`

	// ComputePercentage is how much of the computing of each device the
	// containers may use at most, in percent: 1 to 100. It is for devices whose
	// vendor's software keeps to it.
	ComputePercentage *int `json:"computePercentage,omitempty"`

	// MPS gives the claim a control daemon of NVIDIA's MPS that is its own, so that its
	// containers, in however many pods, compute on its GPUs at the same time. It may be
	// empty: {}. The administrator must allow it.
	MPS *MPSParameters `json:"mps,omitempty"`

	// TimeSlice is how long each program computes on a GPU of NVIDIA before the next has its
	// turn: Default, Short, Medium or Long. The administrator must allow it. It does not go
	// with MPS.
	TimeSlice TimeSlice `json:"timeSlice,omitempty"`
}

// MPSParameters are what a claim's MPS daemon keeps programs to, beside the computePercentage.
type MPSParameters struct {
	// MemoryMiB is how much memory of each GPU each process may use, in MiB.
	MemoryMiB *int `json:"memoryMiB,omitempty"`
}

// TimeSlice is a time slice of a GPU.
type TimeSlice string

// The time slices, by NVIDIA's names. How long they are is the driver's to say.
const (
	TimeSliceDefault TimeSlice = "Default"
	TimeSliceShort   TimeSlice = "Short"
	TimeSliceMedium  TimeSlice = "Medium"
	TimeSliceLong    TimeSlice = "Long"
)
