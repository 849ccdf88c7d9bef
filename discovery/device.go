package discovery

import (
	"cmp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Domain is the domain of Chandler's attributes and the name of the DRA driver. Attribute names
// without a domain, such as "kind", belong to this domain.
const Domain = "chandler.dev"

// Device is a device that a container can be given, as found on the host. Device is plain data:
// everything that Chandler publishes to Kubernetes about the device is computed from these fields.
type Device struct {
	// Name is unique on the host, is a DNS label, and stays the same after a reboot or a hot-swap
	// of other devices. Name is the PCI address and partition index, as in "pci-0000-19-00-0" and
	// "pci-0000-19-00-0-xcp-1", or the kernel's name for a device without an address.
	Name string `json:"name"`

	// Family is the name of the family that recognised the device.
	Family string `json:"family"`

	// Identity is the UUID or serial number that distinguishes this physical device from
	// another in the same slot. Identity is "" while unknown.
	Identity string `json:"identity,omitempty"`

	// Source is the kernel's directory of the device without the leading slash, such as
	// "sys/devices/pci0000:00/0000:00:01.0". When this directory is gone, the device is gone.
	// For a device without a kernel directory, such as a file that the administrator named,
	// Source is the path on the host.
	Source string `json:"-"`

	// Includes lists the directories of the other kernel devices that belong to the device, in
	// the same form: for example, the second function of a two-function chip.
	Includes []string `json:"-"`

	// Attributes are published in the ResourceSlice unchanged.
	Attributes Attributes `json:"attributes,omitempty"`

	// Lists holds the attributes that have several values, as lists. If the cluster supports
	// list attributes, Lists are published in addition to Attributes, and replace attributes of
	// the same name.
	Lists Lists `json:"lists,omitempty"`

	// Capacity is published in the ResourceSlice unchanged. A device with the capacity [Shares]
	// can be allocated to that many containers at once.
	Capacity Capacity `json:"capacity,omitempty"`

	// Facts are family-specific values that only node labels and Grant use; see [Labels].
	Facts map[string]string `json:"facts,omitempty"`

	// CommonNodes lists the host paths of device nodes in Edits that other physical devices may
	// have too. Package scan adds the CommonNodes of the family.
	CommonNodes []string `json:"-"`

	Health Health `json:"health"`

	// Readings are further faults of the device, worst first, in addition to the family's finding
	// in Health. Package scan sets Readings.
	Readings []Health `json:"-"`

	// Shareable marks a device with unlimited sharing, such as /dev/kvm: any number of
	// containers may have the device at once without loss.
	Shareable bool `json:"shareable,omitempty"`

	// Interchangeable is the common name of equal devices, such as "nvidia-imex-channels", if a
	// claim may get any one of them; "" for any other device. ResourceSlices have all of them
	// as one device with the common name, and the driver chooses a device when it prepares a
	// claim. A device with a common name has no identity or capacities. It is a whole physical
	// device, or a part that does not compete with other parts, and then all devices with the name
	// are parts of one physical device. Common names differ from the names of all devices.
	Interchangeable string `json:"interchangeable,omitempty"`

	// OptIn marks an opt-in device. Neither API offers the device unless the administrator
	// gives the device one of the names in PluginOffers. For example, a vendor plugin offers
	// the nodes of all GPUs at once to a monitor only if configured to.
	OptIn bool `json:"optIn,omitempty"`

	// PoolOnly restricts the device to pools of this kind: neither API offers the device unless
	// the administrator puts the device into such a pool. "" means no restriction.
	PoolOnly Pools `json:"poolOnly,omitempty"`

	// Passthrough describes VFIO passthrough of the device, and is nil if the administrator
	// does not allow passthrough. Package scan sets Passthrough.
	Passthrough *PassthroughOption `json:"rebind,omitempty"`

	// Creation describes how to create the device on demand, and is nil if the device exists.
	Creation *Creation `json:"making,omitempty"`

	// SRIOV is the device's pool of the SR-IOV network device plugin, nil if the device is in no
	// such pool. The rules set SRIOV.
	SRIOV *SRIOVPool `json:"sriov,omitempty"`

	// FromConfig marks a device whose parts the administrator named. Package scan sets
	// FromConfig.
	FromConfig bool `json:"-"`

	// PartOf is the physical device that the device shares with others, nil if the device is
	// the whole physical device. Takes is the device's consumption of the counters in PartOf. A
	// device whose Name equals PartOf.Name is the whole physical device.
	PartOf *Silicon                     `json:"partOf,omitempty"`
	Takes  map[string]resource.Quantity `json:"takes,omitempty"`

	// PluginOffers lists the resources that the replaced plugins offer the device as. The
	// administrator's rules decide which of these are offered.
	PluginOffers []Offer `json:"offers,omitempty"`

	// Edits are the container edits that every container with the device needs: nodes, mounts,
	// environment variables, hooks. Host paths are paths on the scanned host.
	Edits specs.ContainerEdits `json:"edits"`

	// SharedEdits are the additional container edits for a shared device, such as the vendor's
	// mechanism for several users of one device. If the administrator shares the device,
	// SharedEdits are added to Edits.
	SharedEdits specs.ContainerEdits `json:"sharedEdits,omitzero"`

	// Files are host files that other programs read while a container has the device, in the
	// directories that the family lists in FileDirs.
	Files []HostFile `json:"files,omitempty"`
}

// Silicon is a physical device with several parts: a PCI function and its partitions, or a physical
// function and its virtual functions. Only one API offers the parts at a time.
type Silicon struct {
	Name string `json:"name"` // a DNS label, by the rules for a device's name

	// Counters is the total that the parts take from, nil if the parts do not compete. All
	// devices of the same Silicon carry the same counters.
	Counters map[string]resource.Quantity `json:"counters,omitempty"`
}

// Pools is a kind of pools that the administrator configures.
type Pools string

// The kinds of pools.
const (
	// SharedPools are the pools of the shared RDMA plugin. These pools take nothing from the
	// users of a device's parts. A device for shared pools only, such as an adapter that has
	// virtual functions, is therefore a separate Silicon.
	SharedPools Pools = "shared"

	// SRIOVPools are the pools of the SR-IOV network device plugin. Devices for these pools only
	// are in use by the host, unless the configuration states otherwise.
	SRIOVPools Pools = "sriov"
)

// SRIOVPool holds the administrator's settings for a pool of the SR-IOV network device plugin, in
// the plugin's terms.
type SRIOVPool struct {
	// AdditionalInfo holds additional information about the devices for containers, keyed by
	// device ID, or by "*" for all devices.
	AdditionalInfo map[string]map[string]string `json:"additionalInfo,omitempty"`

	NeedVhostNet    bool `json:"needVhostNet,omitempty"`    // containers also get /dev/vhost-net and /dev/net/tun
	ExcludeTopology bool `json:"excludeTopology,omitempty"` // the kubelet gets no NUMA nodes
}

// Shares is the capacity that containers consume when a device is shared by number.
const Shares resourceapi.QualifiedName = "shares"

// Mode selects the API that offers devices.
type Mode string

// The modes that an administrator can choose.
const (
	ModeAuto         Mode = ""             // DRA if the cluster has DRA, otherwise the device plugin API
	ModeDRA          Mode = "DRA"          // Dynamic Resource Allocation only
	ModeDevicePlugin Mode = "DevicePlugin" // only the device plugin API
)

// OwnNodes returns the nodes in Edits that no other physical device has.
func (d *Device) OwnNodes() (nodes []*specs.DeviceNode) {
	for _, n := range d.Edits.DeviceNodes {
		if !slices.Contains(d.CommonNodes, cmp.Or(n.HostPath, n.Path)) {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// Silicon returns the name of the device's physical device: PartOf's name, or the device's own
// name.
func (d *Device) Silicon() string {
	if d.PartOf != nil {
		return d.PartOf.Name
	}
	return d.Name
}

// PhysicalName returns the name under which counts of physical devices list the device: the name of
// its Silicon. A physical PCI function that is only a member of a Silicon, such as one of the two
// FPGAs of a card or a function of an IOMMU group, counts by its slot.
func (d *Device) PhysicalName() string {
	if d.Attributes.String("function") != "physical" || d.Silicon() == d.Name {
		return d.Silicon()
	}
	if at := strings.LastIndex(d.Name, "-"); at > 0 { // the number of the function
		return d.Name[:at]
	}
	return d.Name
}
