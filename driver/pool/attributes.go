package pool

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// maxAttributes is the maximum number of attributes of a device that the administrator has not
// listed. With up to 14 entries, a map takes half of the memory that it takes with 15
// (internal/runtime/maps, maxAvgGroupLoad, in Go 1.24 to 1.26), and the scheduler has a map for each
// device.
const maxAttributes = 14

// leftOutFirst are the attributes without which a device with more than [maxAttributes] is
// published, in this order.
var leftOutFirst = []resourceapi.QualifiedName{"pciVendor", "pciDevice", "pKey", "uuid", "pfName", "vfIndex"}

// publishedAttributes returns the attributes of a device in the ResourceSlice. Unless the
// administrator lists them, the optional attributes are left out, and the PCI IDs of a device with a
// model. The one device of interchangeable devices has no attributes that distinguish them. If the
// server keeps lists (KEP-5491), a list replaces the string or number of the same name.
func (b *builder) publishedAttributes(d *rules.Offered) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	own := maps.Clone(d.Attributes)
	if own == nil {
		own = make(discovery.Attributes)
	}
	b.keepInterface(d.Name, own)
	lists := maps.Clone(d.Lists)
	leaveOut := func(names ...resourceapi.QualifiedName) {
		for _, name := range names {
			if !b.isListed(name) {
				delete(own, name)
				delete(lists, name)
			}
		}
	}
	leaveOut(discovery.OptionalAttributes...)
	if b.joined[d.Interchangeable] != nil {
		leaveOut(discovery.DistinctAttributes...)
	}
	if d.Attributes.String("model") != "" {
		leaveOut(discovery.ReplacedByModel...)
	}
	most := maxAttributes
	for name := range own {
		if b.isListed(name) {
			most++
		}
	}
	for _, name := range leftOutFirst {
		if len(own) > most {
			leaveOut(name)
		}
	}
	b.near.describe(d.Name, b.Snapshot.Attributes, own)
	out := own.ForSlice()
	if b.Features.Lists {
		addLists(out, lists, d)
	}
	return out
}

// interfaceAttributes are the attributes that are read from a network interface in the host's network
// namespace.
var interfaceAttributes = []resourceapi.QualifiedName{"ifName", "defaultRoute", "linkLayer", "pfName"}

// keepInterface sets the attributes of the network interface of a device that is allocated, or whose
// claim has just ended. A snapshot lacks them while the interface is in a pod, and without them each
// start and end of such a pod would change a slice. The name is that of the claim's record, if the
// claim moves the interface, and the other values are those of the last pool, which a started agent
// may lack. An interface that a default route of the host uses is never moved to a pod.
func (b *builder) keepInterface(device string, own discovery.Attributes) {
	last := b.lastDevices[device].Attributes
	moved := b.moved[device]
	if len(b.owned[device]) == 0 && !b.Returning[device] || own.String("ifName") != "" || moved == "" && !sameDriver(last, own) {
		return
	}
	own.SetString("ifName", moved)
	if moved != "" {
		own.SetBool("defaultRoute", false)
		if own.String("function") == "physical" {
			own.SetString("pfName", moved)
		}
	}
	for _, name := range interfaceAttributes {
		_, read := own[name]
		if value, published := last[name]; published && (!read || name == "defaultRoute" && moved == "") {
			own[name] = discovery.AttributeOf(value)
		}
	}
}

// sameDriver reports whether a device was last published with its present driver. Another driver may
// create no interface.
func sameDriver(last map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, own discovery.Attributes) bool {
	return last["driver"].StringValue != nil && *last["driver"].StringValue == own.String("driver")
}

// isListed reports whether the administrator lists an attribute.
func (b *builder) isListed(name resourceapi.QualifiedName) bool {
	return slices.Contains(b.Snapshot.Attributes, name)
}
