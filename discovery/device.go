package discovery

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unicode"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Domain is the domain of Chandler's attributes and the name of its DRA
// driver. Attribute names without a domain, such as "kind", are in it.
const Domain = "chandler.dev"

// Device is one thing that can be given to a container, as the host says. It is
// plain data: everything that is said to Kubernetes about the device is computed
// from it.
type Device struct {
	// Name is unique on the host, a DNS label, and the same after a reboot or
	// a hot-swap of other devices: the PCI address and partition index as
	// "pci-0000-19-00-0" and "pci-0000-19-00-0-xcp-1", or what the kernel
	// names a device that has no address.
	Name string `json:"name"`

	// Family is the name of the family that recognised the device.
	Family string `json:"family"`

	// Identity is the UUID or serial number by which this piece of silicon is
	// told from another in the same slot, "" while it is unknown.
	Identity string `json:"identity,omitempty"`

	// Source is the kernel's directory of the device without the leading
	// slash, such as "sys/devices/pci0000:00/0000:00:01.0". The device is gone
	// when this directory is. If the kernel has no directory for it, as for a file
	// that the administrator named, Source is its path on the host.
	Source string `json:"-"`

	// Includes are the directories of further kernel devices that the device
	// consists of, in the same form: the other function of a two-function chip.
	Includes []string `json:"-"`

	// Attributes are as they stand in a ResourceSlice.
	Attributes Attributes `json:"attributes,omitempty"`

	// Lists are the attributes that have several values by nature, as lists. They
	// are published in place of, or beside, those of Attributes where the cluster
	// takes lists.
	Lists Attributes `json:"lists,omitempty"`

	// Capacity is as it stands in a ResourceSlice. A device that has [Shares] can
	// be had by that many containers at once.
	Capacity Capacity `json:"capacity,omitempty"`

	// Facts are what only labels of the node and Grant say of the device, by words of its family;
	// see [Labels].
	Facts map[string]string `json:"facts,omitempty"`

	// CommonNodes are the paths on the host of nodes in Edits that other silicon may
	// have too. [Scan] adds those of the family.
	CommonNodes []string `json:"-"`

	Health Health `json:"health"`

	// Readings are what else is wrong with the device, worst first, beside what
	// its family found. They are set by [Scan].
	Readings []Health `json:"-"`

	// Open says that any number of containers may have the device at once
	// and lose nothing by it, as with /dev/kvm.
	Open bool `json:"shareable,omitempty"`

	// Named says that nobody gets the device, by either API, unless the
	// administrator gives it one of the names of its Classic: what a plugin has
	// only where it is told to, and is not for everybody, such as the nodes of
	// all GPUs at once for a monitor.
	Named bool `json:"optIn,omitempty"`

	// PoolOnly says that nobody gets the device, by either API, unless the
	// administrator has it in a pool of this kind, "" if it needs none.
	PoolOnly Pools `json:"poolOnly,omitempty"`

	// Rebind says how the device can be given to a vfio driver, nil if the
	// administrator does not let it be. It is set by [Scan].
	Rebind *Rebindable `json:"rebind,omitempty"`

	// Making says how the device is made when somebody gets it, nil if it is there.
	Making *Making `json:"making,omitempty"`

	// SRIOV is the pool of the SR-IOV network device plugin that the administrator
	// has the device in, nil if it is in none. It is set by the rules.
	SRIOV *SRIOVPool `json:"sriov,omitempty"`

	// FromConfig says that the administrator named what the device consists of.
	// It is set by [Scan].
	FromConfig bool `json:"-"`

	// PartOf is the silicon that the device shares with others, nil if it is
	// all there is of it, and Takes what it takes of its counters. A
	// device that bears the name of its silicon is all of it.
	PartOf *Silicon                     `json:"partOf,omitempty"`
	Takes  map[string]resource.Quantity `json:"takes,omitempty"`

	// Classic is what the plugins that Chandler replaces offer the device as. The
	// administrator's rules decide what of this is offered.
	Classic []Offer `json:"offers,omitempty"`

	// Edits are what a container needs to use the device, whatever else it is
	// given: nodes, mounts, environment, hooks. Host paths are those of the
	// host that was scanned.
	Edits specs.ContainerEdits `json:"edits"`

	// SharedEdits are what a container needs besides where the device is shared:
	// what the vendor has for users of one device to get on. They become Edits
	// when the administrator has the device shared.
	SharedEdits specs.ContainerEdits `json:"sharedEdits,omitzero"`

	// Files are files of the host that others read while a container has the
	// device, in the directories that its family lists.
	Files []HostFile `json:"files,omitempty"`
}

// Silicon is what several devices are parts of: a PCI function and its partitions,
// a physical function and its virtual ones. Only one API offers it at a time.
type Silicon struct {
	Name string `json:"name"` // a DNS label, by the same rules as a device's name

	// Counters is how much there is to take, nil if the parts do not compete.
	// Devices that share the silicon carry the same counters.
	Counters map[string]resource.Quantity `json:"counters,omitempty"`
}

// AnyNumber is how many IDs a device has under the device-plugin API that any number of
// containers may have: the default of KubeVirt's --max-devices.
const AnyNumber = 1000

// Offer is one classic resource that a device stands behind. One device may
// have many IDs (shares), many Offers, and several devices may share a Unit,
// which is then only handed out as a whole (a two-chip card).
//
// A Named one is only offered once the administrator has given its resource to the
// device, and then instead of the others: what the plugin has in a mode that is not
// its default, such as larger units of the same silicon.
type Offer struct {
	// Resource is the name that everybody knows the device by: "amd.com/gpu". If
	// there is none, it is a pattern of the names that the administrator may give
	// it: [AnyName], or "nvidia.com/*" for IDs that a plugin has for its own names
	// alone. Such an offer is only made once there is a name.
	Resource string   `json:"resource"`
	IDs      []string `json:"ids"`            // as the plugin that Chandler replaces gives them
	Unit     string   `json:"unit,omitempty"` // "" if the device is a unit of its own
	Named    bool     `json:"optional,omitempty"`

	// SRIOV says that the offer is for pools of the SR-IOV network device plugin,
	// and for no other names: it has other IDs than the plugins for other names.
	SRIOV bool `json:"sriov,omitempty"`

	// Members is how many devices the Unit consists of, if it is of several and
	// only given with all of them, as a card is with its FPGAs. It is 0 where
	// whatever the administrator leaves of a unit will do, as of an IOMMU group.
	Members int `json:"members,omitempty"`

	// Pool says that an ID stands for those devices of the Unit that can be used, and
	// for all where Pool is false. It is set by the rules.
	Pool bool `json:"pool,omitempty"`

	// NameAs is the attribute under which DRA publishes the name of the resource
	// too, for those who look a device up by it there as in the classic API, ""
	// if there are none.
	NameAs resourceapi.QualifiedName `json:"nameAs,omitempty"`

	// Dialect is how the plugin writes the IDs of shares, [Replicas] if it is zero.
	Dialect

	// Counts is the capacity of which each ID is a unit: what a container asks
	// for is an amount, and comes from one device. It is set by [Rules].
	Counts resourceapi.QualifiedName `json:"counts,omitempty"`
}

// Pools are a kind of pools that the administrator makes.
type Pools string

// The kinds of pools.
const (
	// SharedPools are those of the shared RDMA plugin. They take nothing from the users
	// of a device's parts, so a device that is for them alone, such as an adapter that
	// has virtual functions, is silicon of its own.
	SharedPools Pools = "shared"

	// SRIOVPools are those of the SR-IOV network device plugin. The host
	// uses the devices that are for them alone, unless the administrator says otherwise.
	SRIOVPools Pools = "sriov"
)

// SRIOVPool is what the administrator wants of a pool of the SR-IOV network device
// plugin, in the plugin's words.
type SRIOVPool struct {
	// AdditionalInfo is what containers are told of the devices besides, by the
	// devices' IDs, or by "*" of all.
	AdditionalInfo map[string]map[string]string `json:"additionalInfo,omitempty"`

	NeedVhostNet    bool `json:"needVhostNet,omitempty"`    // containers get /dev/vhost-net and /dev/net/tun too
	ExcludeTopology bool `json:"excludeTopology,omitempty"` // the kubelet is told no NUMA nodes
}

// AnyName is the Resource of an offer that may have any name.
const AnyName = "*"

// Unnamed reports whether the offer waits for a name.
func (o *Offer) Unnamed() bool { return strings.HasSuffix(o.Resource, "*") }

// Shares is the capacity of which containers take where a device is shared by
// number.
const Shares resourceapi.QualifiedName = "shares"

// Mode is an API that offers devices.
type Mode string

// The modes that an administrator may choose.
const (
	ModeAuto         Mode = ""             // DRA where the cluster has it, else the device-plugin API
	ModeDRA          Mode = "DRA"          // Dynamic Resource Allocation only
	ModeDevicePlugin Mode = "DevicePlugin" // the classic device-plugin API only
)

// Attributes are a device's attributes by name; see docs/attributes.md for the
// vocabulary that all families share.
type Attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// SetString sets a string attribute. An empty value is left out, since it is
// not known; one longer than the API's limit is cut at a character's end, and
// what cannot be printed becomes a space.
func (a Attributes) SetString(name resourceapi.QualifiedName, value string) {
	value = strings.TrimSpace(strings.Map(printable, strings.ToValidUTF8(value, "")))
	if len(value) > resourceapi.DeviceAttributeMaxValueLength {
		value = strings.TrimSpace(strings.ToValidUTF8(value[:resourceapi.DeviceAttributeMaxValueLength], ""))
	}
	if value != "" {
		a[name] = resourceapi.DeviceAttribute{StringValue: &value}
	}
}

func printable(r rune) rune {
	if unicode.IsPrint(r) {
		return r
	}
	return ' '
}

// SetInt sets an integer attribute.
func (a Attributes) SetInt(name resourceapi.QualifiedName, value int64) {
	a[name] = resourceapi.DeviceAttribute{IntValue: &value}
}

// SetBool sets a boolean attribute.
func (a Attributes) SetBool(name resourceapi.QualifiedName, value bool) {
	a[name] = resourceapi.DeviceAttribute{BoolValue: &value}
}

// Values returns the value of an attribute as text, or the values of a list.
func Values(a resourceapi.DeviceAttribute) (values []string) {
	switch {
	case a.StringValue != nil:
		return []string{*a.StringValue}
	case a.VersionValue != nil:
		return []string{*a.VersionValue}
	case a.IntValue != nil:
		return []string{strconv.FormatInt(*a.IntValue, 10)}
	case a.BoolValue != nil:
		return []string{strconv.FormatBool(*a.BoolValue)}
	}
	values = slices.Concat(a.StringValues, a.VersionValues)
	for _, value := range a.IntValues {
		values = append(values, strconv.FormatInt(value, 10))
	}
	for _, value := range a.BoolValues {
		values = append(values, strconv.FormatBool(value))
	}
	return values
}

// String returns the value of a string attribute, "" if there is none.
func (a Attributes) String(name resourceapi.QualifiedName) string {
	if value := a[name].StringValue; value != nil {
		return *value
	}
	return ""
}

// Capacity is what a device has of things that can be counted.
type Capacity map[resourceapi.QualifiedName]resourceapi.DeviceCapacity

// Set sets a capacity that is a number, in bytes for memory.
func (c Capacity) Set(name resourceapi.QualifiedName, value int64) {
	format := resource.DecimalSI
	if name == "memory" {
		format = resource.BinarySI
	}
	c[name] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(value, format)}
}

// Snapshot is all devices of a host at one moment. It is never modified.
type Snapshot struct {
	Devices  []Device // in name order
	Problems []Problem

	// Gone is the health of devices that were there before, also of those that
	// nobody has. It is set by [Settler].
	Gone Missing

	// found is what families found, before it was joined. Only [Scan] and [Merge] make a
	// snapshot that has it.
	found found
}

// Problem is what could not be read, or is not as it should be. It never ends
// a scan.
type Problem struct {
	Device string // the name of the device, or of what was looked at
	Err    error
}

// Lookup returns the device of that name.
func (s *Snapshot) Lookup(name string) (Device, bool) {
	i, found := sort.Find(len(s.Devices), func(i int) int { return strings.Compare(name, s.Devices[i].Name) })
	if !found {
		return Device{}, false
	}
	return s.Devices[i], true
}

// OwnNodes returns the nodes in Edits that no other silicon has.
func (d *Device) OwnNodes() (nodes []*specs.DeviceNode) {
	for _, n := range d.Edits.DeviceNodes {
		if !slices.Contains(d.CommonNodes, cmp.Or(n.HostPath, n.Path)) {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// Silicon names the silicon that the device competes for: what it is part of, or
// itself.
func (d *Device) Silicon() string {
	if d.PartOf != nil {
		return d.PartOf.Name
	}
	return d.Name
}

// MarshalJSON writes {"devices":[…],"problems":[…]}, both always there.
func (s *Snapshot) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Devices  []Device  `json:"devices"`
		Problems []Problem `json:"problems"`
	}{append([]Device{}, s.Devices...), append([]Problem{}, s.Problems...)})
}

// MarshalJSON writes {"device":…,"error":…}.
func (p Problem) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Device string `json:"device"`
		Error  string `json:"error"`
	}{p.Device, p.Err.Error()})
}

// Problems returns the problem of a device as a list, which is empty if err is
// nil.
func Problems(device string, err error) []Problem {
	if err == nil {
		return nil
	}
	return []Problem{{device, err}}
}

// Error returns the problem in words.
func (p Problem) Error() string { return fmt.Sprintf("%s: %v", p.Device, p.Err) }

// Unwrap returns what went wrong.
func (p Problem) Unwrap() error { return p.Err }
