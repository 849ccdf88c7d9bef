// Package v1alpha1 defines the configuration types that users write: for the agents, for the PCI
// functions of a host, and for the parameters of a claim. It contains types, defaults and
// validation, and determines which entries apply to a node. It does not act on them.
//
// Validation returns a field.ErrorList, as in Kubernetes. The detail of an error contains the value
// where users need it, so [JoinErrors] writes each error as its path and its detail, and leaves out the
// type and the value that field.Error prints between them.
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

// DriverConfig is the configuration of the agents. The flag --config names its file. All fields are
// optional. Entries of lists can be limited to some nodes.
type DriverConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Mode is the API that offers devices, unless an entry of Resources selects another: Auto (the
	// default), DRA or DevicePlugin. With ReportOnly, the agent finds and reports devices, and offers
	// none.
	Mode Mode `json:"mode,omitempty"`

	// Exclude lists devices that are not offered.
	Exclude []Selector `json:"exclude,omitempty"`

	// Sharing allows several containers to share a device. For each device, the first matching
	// entry applies.
	Sharing []Sharing `json:"sharing,omitempty"`

	// Resources rename devices in the device plugin API, or select the API that offers them. For
	// each device, the first matching entry applies.
	Resources []Resource `json:"resources,omitempty"`

	// Allocation configures how the device plugin API allocates the devices of a resource. If
	// several entries for the same resource apply to a node, the first one wins.
	Allocation []Allocation `json:"allocation,omitempty"`

	// Passthrough lists PCI functions for VFIO passthrough, which claims and resources request with
	// driver vfio. An allocated function is taken from its kernel driver until it is released. This
	// needs the host service, and a change takes effect when the agent restarts. For each device, the
	// first matching entry applies.
	Passthrough []Passthrough `json:"passthrough,omitempty"`

	// Reclaim determines how a device is checked and reset between two consumers. This needs the
	// host service. For each device, the first matching entry applies.
	Reclaim []Reclaim `json:"reclaim,omitempty"`

	// OnDemand configures devices that are created on demand, when claims or resources need them,
	// and removed when they are no longer in use. This needs the host service. A change takes effect
	// when the agent restarts, except a change of keepSeconds.
	OnDemand OnDemand `json:"onDemand,omitzero"`

	// Overhead is the CPU and memory of the host that a pod needs in addition for a device. For
	// each device, the first matching entry applies.
	Overhead []Overhead `json:"overhead,omitempty"`

	// Attributes lists attributes that ResourceSlices do not have by default, such as group4, serial or
	// pciDevice. The expressions in this configuration can use all attributes in any case. Each
	// attribute costs memory and time in the scheduler.
	Attributes []string `json:"attributes,omitempty"`

	// DriverRoots are directories of the host with vendor software for a family, such as libraries
	// or bitstreams, by the family's name with an optional suffix:
	//	driverRoots: {nvidia: /run/nvidia/driver, nvidia-mps: /run/nvidia/mps}
	DriverRoots map[string]string `json:"driverRoots,omitempty"`

	// Paths are device nodes, files and USB devices of the host that are offered by path or USB ID.
	Paths []PathResource `json:"paths,omitempty"`

	// Hooks determines whether container runtimes run the agent's program for containers with
	// devices, for example so that the container's loader finds a vendor's libraries. The default
	// is Auto.
	Hooks Hooks `json:"hooks,omitempty"`

	// Health configures the effects of unhealthy devices on pods.
	Health Health `json:"health,omitzero"`
}

// Hooks determines whether CDI specs have hooks.
type Hooks string

// The choices for hooks.
const (
	// HooksAuto adds hooks to devices that work better with them.
	HooksAuto Hooks = "Auto"

	// HooksNone adds no hooks, for container runtimes that forbid hooks.
	HooksNone Hooks = "None"
)

// Health configures the effects of device conditions.
type Health struct {
	// Severity overrides the documented effects of conditions, by the condition's name:
	//	severity: {over-temperature: NoExecute, link-degraded: NoSchedule}
	Severity map[string]Effect `json:"severity,omitempty"`
}

// Effect is the effect of a device condition on pods, which is the effect of the device's taint in
// DRA.
type Effect string

// The effects. The device plugin API evicts no pods: there, NoExecute has the effect of NoSchedule.
const (
	EffectNone       Effect = "None"       // the condition is only reported
	EffectNoSchedule Effect = "NoSchedule" // no new pod gets the device
	EffectNoExecute  Effect = "NoExecute"  // pods that have the device are also evicted
)

// Mode is an API that offers devices, or ReportOnly.
type Mode string

// The modes.
const (
	// ModeAuto selects DRA if the cluster supports it, and otherwise the device plugin API. On nodes
	// with /dev/kvm and similar devices only, it selects the device plugin API.
	ModeAuto         Mode = "Auto"
	ModeDRA          Mode = "DRA"
	ModeDevicePlugin Mode = "DevicePlugin"
	// ModeReportOnly offers no devices. It is not a mode of an entry of resources.
	ModeReportOnly Mode = "ReportOnly"
)

// Selector selects devices on some or all nodes.
type Selector struct {
	// CEL is an expression over "device", as in a DeviceClass:
	//	device.attributes["chandler.dev"].kind == "gpu"
	// If a device lacks an attribute that the expression reads, the device is not selected, and an
	// error is reported. For optional attributes, write .?name.orValue("").
	CEL string `json:"cel"`

	// Nodes limits the entry to some nodes. By default, the entry applies to all nodes.
	Nodes *Nodes `json:"nodes,omitempty"`
}

// Sharing configures how containers share each of the selected devices: by number (Replicas) or by
// units of a capacity (Unit). Chandler does not enforce the shares: a container can use the
// resources of another, unless the device or the vendor's software prevents it.
type Sharing struct {
	Selector `json:",inline"`

	// Resource is the shares' resource name in the device plugin API, such as aliyun.com/gpu-mem.
	// Entries with the same name must have equal shares. With Replicas, the name is optional: by
	// default, shares have the devices' resource name.
	Resource string `json:"resource,omitempty"`

	// Replicas is the number of containers that can share a device. In DRA, each container takes
	// one unit of the capacity "shares", which has this size.
	Replicas int `json:"replicas,omitempty"`

	// Pool gives a container all of the selected devices, and makes Replicas the total number of
	// shares. It is for the device plugin API; in DRA, a claim can request several devices.
	Pool bool `json:"pool,omitempty"`

	// Unit is the size of one unit, such as 1Gi. In the device plugin API, a container requests a
	// number of units, all of the same device. In DRA, a claim requests an amount, which is rounded
	// up to whole units, or by default all of the capacity. The number of units of a resource is
	// limited by the kubelet, which accepts lists of up to 4 MiB.
	Unit *resource.Quantity `json:"unit,omitempty"`

	// Capacity is the capacity that is split into units: memory (the default), cores, or another
	// capacity of the devices.
	Capacity string `json:"capacity,omitempty"`
}

// Resource configures how the selected devices are offered.
type Resource struct {
	Selector `json:",inline"`

	// Name is the resource name of the devices in the device plugin API, instead of the family's
	// own name: example.com/gpu-large.
	Name string `json:"name"`

	// Mode is the API that offers the devices: Auto, DRA or DevicePlugin. The default is the mode of
	// the configuration. If that is ReportOnly, it applies to these devices too.
	Mode Mode `json:"mode,omitempty"`

	// AcceleratorFunction is the function to program into FPGAs before the device plugin API offers
	// them under this name, as in [ClaimParameters]. In DRA, claims select the function.
	AcceleratorFunction string `json:"acceleratorFunction,omitempty"`

	// Driver is vfio for devices that are bound to a vfio driver before the device plugin API
	// offers them under this name, as in [ClaimParameters]. An entry of passthrough must select the
	// devices, or they must already be bound to a vfio driver.
	Driver DriverKind `json:"driver,omitempty"`

	// SRIOV makes the entry a pool of the SR-IOV network device plugin. For PCI functions under
	// vfio, the IDs are then PCI addresses, and containers get the environment variable
	// PCIDEVICE_<PREFIX>_<NAME>. Without SRIOV, IDs and variables are those of KubeVirt: IOMMU
	// groups, and PCI_RESOURCE_<NAME>. The value can be empty: {}.
	SRIOV *SRIOVPool `json:"sriov,omitempty"`
}

// SRIOVPool has the settings that are specific to pools of the SR-IOV network device plugin.
type SRIOVPool struct {
	// AdditionalInfo is the content of "extra" in the environment variable
	// PCIDEVICE_<PREFIX>_<NAME>_INFO, by device ID. The ID "*" stands for all devices; the entry of
	// a device overrides single keys.
	AdditionalInfo map[string]map[string]string `json:"additionalInfo,omitempty"`

	// NeedVhostNet adds /dev/vhost-net and /dev/net/tun to containers.
	NeedVhostNet bool `json:"needVhostNet,omitempty"`

	// ExcludeTopology hides the devices' NUMA nodes from the kubelet.
	ExcludeTopology bool `json:"excludeTopology,omitempty"`
}

// DriverKind is a kind of kernel driver for allocated devices.
type DriverKind string

// The kinds.
const (
	// DriverVFIO binds a PCI function to a vfio driver, for a virtual machine or a user space
	// program.
	DriverVFIO DriverKind = "vfio"
)

// Allocation configures how the device plugin API allocates the devices or shares of a resource.
// The scheduler only counts them; the selection happens on the node.
type Allocation struct {
	// Resource is the resource name: nvidia.com/gpu.
	Resource string `json:"resource"`

	// Nodes limits the entry to some nodes. By default, the entry applies to all nodes.
	Nodes *Nodes `json:"nodes,omitempty"`

	// Policy selects the devices that a container gets together: Aligned (the default), Spread or
	// Packed.
	Policy Policy `json:"policy,omitempty"`

	// FailRequestsGreaterThanOne rejects containers that request more than one. It is intended for
	// shares: two shares may be of the same device, and then provide no more than a single share.
	FailRequestsGreaterThanOne bool `json:"failRequestsGreaterThanOne,omitempty"`

	// DeviceListStrategy selects one or more ways to pass devices to containers. The default is
	// EnvVar, or CDIDevices for devices that require it.
	DeviceListStrategy []DeviceListStrategy `json:"deviceListStrategy,omitempty"`

	// DeviceIDStrategy selects the device IDs for NVIDIA's container runtime: UUID (the default) or
	// Index.
	DeviceIDStrategy DeviceIDStrategy `json:"deviceIDStrategy,omitempty"`

	// Env are additional environment variables for containers with such a device, for use by
	// container runtimes: {NVIDIA_GDS: enabled}. The devices' own variables take precedence.
	Env map[string]string `json:"env,omitempty"`

	// MatchAttributes lists attributes that must have the same value, or no value, for all devices of the
	// resource on a node: [function, profile]. If two devices differ, the node offers no device
	// under this name, and the agent reports the two devices.
	MatchAttributes []string `json:"matchAttributes,omitempty"`
}

// DeviceIDStrategy selects the device IDs for NVIDIA's container runtime.
type DeviceIDStrategy string

// The strategies.
const (
	DeviceIDUUID  DeviceIDStrategy = "UUID"  // the devices' UUIDs
	DeviceIDIndex DeviceIDStrategy = "Index" // NVML's device numbers, if chandler-host runs on the node
)

// DeviceListStrategy is a way to pass devices to containers.
type DeviceListStrategy string

// The strategies.
const (
	// ListEnvVar passes device nodes, mounts and environment variables through the kubelet. One of
	// the variables contains the device IDs for NVIDIA's container runtime.
	ListEnvVar DeviceListStrategy = "EnvVar"

	// ListVolumeMounts is like EnvVar, but passes the device IDs to NVIDIA's container runtime by
	// mounts, which a container cannot forge.
	ListVolumeMounts DeviceListStrategy = "VolumeMounts"

	// ListCDIAnnotations passes CDI device names in an annotation, for container runtimes that
	// support it. It works with all kubelet versions.
	ListCDIAnnotations DeviceListStrategy = "CDIAnnotations"

	// ListCDIDevices passes CDI device names through the kubelet to the container runtime. It needs
	// Kubernetes 1.29.
	ListCDIDevices DeviceListStrategy = "CDIDevices"
)

// Policy selects the devices and shares that a container gets together.
type Policy string

// The policies. The distance between devices follows from the hardware that they share: partitions
// of one device, private links, PCIe switches and roots, NUMA nodes.
const (
	// PolicyAligned selects devices that are close to each other, and leaves other close devices
	// for later containers. Shares are taken from the devices with the most shares left.
	PolicyAligned Policy = "Aligned"

	// PolicySpread selects devices that are far from each other. Shares are selected as with
	// Aligned.
	PolicySpread Policy = "Spread"

	// PolicyPacked selects devices as with Aligned. Shares are taken from the devices with the
	// fewest shares left, so that other devices stay free.
	PolicyPacked Policy = "Packed"
)

// Overhead is the amount of the node's resources that a pod needs for each selected device, in
// addition to the requests of its containers: for example, the host memory of a GPU's driver, or
// the CPU time for polling a queue. The scheduler adds the overhead to the pod's requests, and the
// kubelet allows the pod to use it, if DRA offers the device and the cluster has the feature gate
// DRANodeAllocatableResources (KEP-5517). Otherwise, the entry has no effect.
type Overhead struct {
	Selector `json:",inline"`

	// PerPod is added once for each pod, {memory: 512Mi}, and PerContainer for each container that
	// uses the claim. The names are cpu, memory, or a size of huge pages: hugepages-2Mi.
	PerPod       map[string]resource.Quantity `json:"perPod,omitempty"`
	PerContainer map[string]resource.Quantity `json:"perContainer,omitempty"`
}

// PathResource is a resource of devices that are selected by path or USB ID. In DRA, the devices
// have its name in the attribute "resource".
type PathResource struct {
	// Name is the resource name in the device plugin API, unique on each node: example.com/serial.
	// The maximum length is 64 characters.
	Name string `json:"name"`

	// Nodes limits the entry to some nodes. By default, the entry applies to all nodes.
	Nodes *Nodes `json:"nodes,omitempty"`

	// Kind is the attribute "kind" of the devices. The default is "other".
	Kind string `json:"kind,omitempty"`

	// Env are environment variables for all containers with such a device.
	Env map[string]string `json:"env,omitempty"`

	// Groups define the devices.
	Groups []PathGroup `json:"groups"`
}

// PathGroup defines devices from either paths or USB devices, or by a number.
type PathGroup struct {
	// Paths are the parts of each device: device N combines the Nth match of each path. The path
	// with the most matches sets the number of devices, unless another path runs out of matches:
	// each match is used up to the limit of its path.
	Paths []Path `json:"paths,omitempty"`

	// USB lists devices by vendor and product ID. All matching devices together form one device.
	// With Each, one matching device per entry forms a device.
	USB []USBDevice `json:"usb,omitempty"`

	// Each forms a device from one USB device per entry, as many times as there are such sets, as
	// KubeVirt does.
	Each bool `json:"each,omitempty"`

	// Count is the number of containers that can share each device: 1 (the default) to 4096.
	Count int `json:"count,omitempty"`

	// Units is the number of devices, at most 1024, for hardware that cannot be counted on the
	// host. A unit has all matches of the group's paths and USB devices; without matches, there are
	// no units. A group with Units needs no paths, but then creates no devices while another family
	// offers devices of the same kind. In the device plugin API, the IDs are the numbers of the
	// units, from 0.
	Units int `json:"units,omitempty"`

	// UnitEnv is an environment variable with the numbers of a container's units, separated by
	// commas: ACCELERATOR_UNITS.
	UnitEnv string `json:"unitEnv,omitempty"`
}

// Path is a device node of the host, or a file or directory to mount. The agent must see it: paths
// outside of /dev must be mounted into the agent's pod.
type Path struct {
	// Path is an absolute path or a pattern: /dev/ttyUSB*. A directory stands for all device nodes
	// below it.
	Path string `json:"path"`

	// MountPath is the path in the container. The default is the path on the host. If it ends in a
	// slash, it is the parent directory in the container.
	MountPath string `json:"mountPath,omitempty"`

	// Permissions are a container's permissions on a device node: read (r), write (w), and create
	// nodes for it (m). The default is mrw.
	Permissions string `json:"permissions,omitempty"`

	// Type is Device (the default) or Mount.
	Type PathType `json:"type,omitempty"`

	// ReadOnly mounts a Mount read-only.
	ReadOnly bool `json:"readOnly,omitempty"`

	// Limit is the number of devices of the group that can share a match, if other paths of the
	// group have more matches. The default is 1.
	Limit int `json:"limit,omitempty"`

	// Optional allows devices without this path if nothing matches.
	Optional bool `json:"optional,omitempty"`
}

// PathType is the way a path gets into a container.
type PathType string

// The types of paths.
const (
	PathTypeDevice PathType = "Device"
	PathTypeMount  PathType = "Mount"
)

// USBDevice selects USB devices.
type USBDevice struct {
	// Vendor and Product are the IDs, up to four hexadecimal digits. Quote IDs that YAML would read
	// as a number: "1209".
	Vendor  string `json:"vendor"`
	Product string `json:"product"`

	// Serial is the serial number. By default, every serial number matches.
	Serial string `json:"serial,omitempty"`
}

// ClaimParameters are parameters of a ResourceClaim or a DeviceClass for Chandler, as opaque
// configuration of the driver chandler.dev, for one request or for all. A claim overrides its
// class. If a device of the request does not support a parameter, the claim is refused, so that a
// claim is never applied in part. No parameter contains a path, a mount or a hook of the host.
type ClaimParameters struct {
	metav1.TypeMeta `json:",inline"`

	// InterfaceName is the name of the device's network interface in the container: "net1". The
	// interface is moved into the container. The maximum length is 15 characters.
	InterfaceName string `json:"interfaceName,omitempty"`

	// AcceleratorFunction is the function to program into an FPGA, by the vendor's ID: 8 to 40
	// hexadecimal digits. Dashes are ignored.
	AcceleratorFunction string `json:"acceleratorFunction,omitempty"`

	// Driver is vfio for PCI functions under a vfio driver, for a virtual machine or a user space
	// program. The administrator must allow passthrough of the functions. After the claim, they
	// return to their own driver. Driver cannot be combined with other parameters.
	Driver DriverKind `json:"driver,omitempty"`

	// Environment are environment variables that tune the device's own libraries in containers:
	// {HSA_XNACK: "1"}. The supported variables depend on the device's family. If claim and class
	// set the same variable, the claim overrides the class. The limits are 32 C identifiers of up
	// to 64 characters, each with 1 to 256 printable ASCII characters.
	Environment map[string]string `json:"environment,omitempty"`

	// ComputePercentage limits the share of each device's computing that the containers can use, in
	// percent: 1 to 100. It is supported for devices whose vendor software enforces the limit.
	ComputePercentage *int `json:"computePercentage,omitempty"`

	// MPS gives the claim its own control daemon of NVIDIA's Multi-Process Service, so that its
	// containers, in any number of pods, compute on its GPUs at the same time. The value can be
	// empty: {}. The administrator must allow this.
	MPS *MPSParameters `json:"mps,omitempty"`

	// TimeSlice is the length of each program's turn on an NVIDIA GPU: Default, Short, Medium or
	// Long. The administrator must allow this. It cannot be combined with MPS.
	TimeSlice TimeSlice `json:"timeSlice,omitempty"`
}

// MPSParameters are limits that a claim's MPS daemon enforces, in addition to computePercentage.
type MPSParameters struct {
	// MemoryMiB limits the memory of each GPU for each process, in MiB.
	MemoryMiB *int `json:"memoryMiB,omitempty"`
}

// TimeSlice is a time slice of a GPU.
type TimeSlice string

// The time slices, by NVIDIA's names. The driver determines their length.
const (
	TimeSliceDefault TimeSlice = "Default"
	TimeSliceShort   TimeSlice = "Short"
	TimeSliceMedium  TimeSlice = "Medium"
	TimeSliceLong    TimeSlice = "Long"
)
