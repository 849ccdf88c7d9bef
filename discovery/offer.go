package discovery

import (
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// AnyNumber is the number of IDs that the device plugin API lists for a device with unlimited
// sharing, as in the default of KubeVirt's --max-devices.
const AnyNumber = 1000

// Offer is one extended resource that a device provides. A device can have many IDs (shares) and
// many Offers. Several devices can share a Unit, which is then only allocated as a whole (a
// two-chip card).
//
// An Optional offer replaces the device's other offers once the administrator has given its
// resource name to the device. Optional offers describe modes of a plugin that are not the plugin's
// default, such as larger units of the same physical device.
type Offer struct {
	// Resource is the established resource name of the device, such as "amd.com/gpu". Without an
	// established name, Resource is a pattern of names that the administrator may choose:
	// [AnyName], or "nvidia.com/*" for IDs that a plugin uses only for names of its own. An offer
	// with a pattern takes effect only after the administrator has chosen a name.
	Resource string   `json:"resource"`
	IDs      []string `json:"ids"`            // in the format of the plugin that Chandler replaces
	Unit     string   `json:"unit,omitempty"` // "" if the device is a unit by itself
	Optional bool     `json:"optional,omitempty"`

	// SRIOV restricts the offer to pools of the SR-IOV network device plugin, whose IDs differ
	// from those of the plugins for other names.
	SRIOV bool `json:"sriov,omitempty"`

	// Members is the number of devices in a Unit that is only allocated complete, such as a card
	// with its FPGAs. Members is 0 if an incomplete unit may be allocated: in an IOMMU group, the
	// devices that the administrator has not excluded are enough.
	Members int `json:"members,omitempty"`

	// Pool lets an ID stand for the usable devices of the Unit. If Pool is false, an ID stands
	// for all devices of the Unit. The rules set Pool.
	Pool bool `json:"pool,omitempty"`

	// NameAs is the attribute under which DRA also publishes the resource name, for programs that
	// look up a device by that name. "" means that no such programs exist.
	NameAs resourceapi.QualifiedName `json:"nameAs,omitempty"`

	// Dialect is the plugin's format for the IDs of shares. The zero value is [Replicas].
	Dialect

	// Counts is the capacity that the IDs are units of. A container then requests an amount,
	// which comes from a single device. [Rules] set Counts.
	Counts resourceapi.QualifiedName `json:"counts,omitempty"`
}

// AnyName is the Resource of an offer that accepts any name.
const AnyName = "*"

// IsUnnamed reports whether the offer has no resource name yet.
func (o *Offer) IsUnnamed() bool { return strings.HasSuffix(o.Resource, "*") }

// CountMembers sets the Members of all offers with a Unit to the number of devices in that unit.
// CountMembers is for families whose units are allocated only as a whole, such as cards with
// several functions.
func CountMembers(devices []Device) {
	offers := make([][]Offer, len(devices))
	for i := range devices {
		offers[i] = devices[i].PluginOffers
	}
	members := MemberCounter(offers)
	for _, of := range offers {
		for i := range of {
			if n := members(of[i]); of[i].Unit != "" && n > 1 {
				of[i].Members = n
			}
		}
	}
}

// MemberCounter returns a function that counts the devices in the unit of an offer. offers are the
// offers of each device.
func MemberCounter(offers [][]Offer) func(Offer) int {
	type unit struct{ resource, name string }
	members := make(map[unit]int)
	for _, of := range offers {
		counted := make(map[unit]bool)
		for _, offer := range of {
			if u := (unit{offer.Resource, offer.Unit}); !counted[u] {
				counted[u] = true
				members[u]++
			}
		}
	}
	return func(offer Offer) int { return members[unit{offer.Resource, offer.Unit}] }
}

// Dialect is a device plugin's format of the IDs of shares: "GPU-1::3" is a share of "GPU-1".
type Dialect struct {
	// Infix stands between the ID of the device and the number of the share.
	Infix string `json:"shareInfix,omitempty"`

	// Stem replaces the device's ID and Infix if the ID of an unshared device ends in a number of its
	// own. For example, a GPU has the ID "card1-0" alone, and "card1-0", "card1-1", … with sharing:
	// its Stem is "card1-". The number of shares of a Shareable device with a Stem can be changed.
	Stem string `json:"shareStem,omitempty"`
}

// The dialects of plugins with sharing for any family. Chandler writes Replicas and Units.
var (
	Replicas = Dialect{Infix: "::"}  // the NVIDIA device plugin: copies of a device
	Units    = Dialect{Infix: "-_-"} // Aliyun GPU sharing: units of memory
	vGPUs    = Dialect{Infix: "-"}   // HAMi
)

// Dialects returns the possible dialects for the shares of any device.
func Dialects() []Dialect { return []Dialect{Replicas, Units, vGPUs} }

// Before returns the text before the number of a share. id is the ID of the unshared device.
func (d Dialect) Before(id string) string {
	if d.Stem != "" {
		return d.Stem
	}
	return id + d.Infix
}

// Share is a container's part of a unit-shared device.
type Share struct {
	Place     int // index of the device in the resource
	Container int // units of the container
	Call      int // units of all containers of the call
	Device    int // units of the device
}

// Variables returns the environment variables of Aliyun GPU sharing for a container. For
// aliyun.com/gpu-mem they are ALIYUN_COM_GPU_MEM_IDX, _POD, _CONTAINER and _DEV.
func (s Share) Variables(resource string) []string {
	prefix := VariableName(resource) + "_"
	return []string{
		prefix + "IDX=" + strconv.Itoa(s.Place),
		prefix + "POD=" + strconv.Itoa(s.Call),
		prefix + "CONTAINER=" + strconv.Itoa(s.Container),
		prefix + "DEV=" + strconv.Itoa(s.Device),
	}
}
