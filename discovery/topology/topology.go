// Package topology computes how close devices are to each other in the machine, for topology-aware
// allocation in both APIs. The package depends on no vendor and reads no host.
package topology

import (
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Place is the location of a device, or of several devices that are only allocated together. A
// Place is never modified.
type Place struct {
	names, silicon []string
	linked         []string // names of the devices at the other ends of private links
	fabric, root   string
	bridges        []string // the PCI bridges above the place, the highest first
	numa           []int64
}

// PlaceOf returns the place of devices that are allocated together.
func PlaceOf(devices ...*discovery.Device) *Place {
	p := &Place{}
	for _, d := range devices {
		p.names = append(p.names, d.Name)
		if !d.Shareable {
			p.silicon = append(p.silicon, d.Silicon())
		}
		p.linked = append(p.linked, d.Names("linkedTo")...)
		p.fabric = firstKnown(p.fabric, d, "fabric")
		p.root = firstKnown(p.root, d, deviceattribute.StandardDeviceAttributePCIeRoot)
		if p.bridges == nil {
			p.bridges = bridgesAbove(d.Source)
		}
		node := d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode]
		if node.IntValue != nil {
			p.numa = append(p.numa, *node.IntValue)
		}
	}
	slices.Sort(p.silicon)
	p.silicon = slices.Compact(p.silicon)
	slices.Sort(p.numa)
	p.numa = slices.Compact(p.numa)
	return p
}

// firstKnown returns known, or a string attribute of the device if known is empty.
func firstKnown(known string, d *discovery.Device, name resourceapi.QualifiedName) string {
	if known != "" {
		return known
	}
	return d.Attributes.String(name)
}

// bridgesAbove returns the addresses of the PCI bridges above a function, from the kernel's
// directory of the function or of a device below it: the directory of each bridge is in the
// directory of the bridge above it.
func bridgesAbove(source string) []string {
	var functions []string
	for element := range strings.SplitSeq(source, "/") {
		if sysfs.IsPCIAddress(element) {
			functions = append(functions, element)
		}
	}
	return functions[:max(0, len(functions)-1)]
}

// Silicon returns the names of the place's physical devices, without open devices.
func (p *Place) Silicon() []string { return p.silicon }

// NUMA returns the NUMA nodes of the place, in ascending order.
func (p *Place) NUMA() []int64 { return p.numa }

// Names returns the names of the devices.
func (p *Place) Names() []string { return p.names }

// Each value exceeds the sum of all smaller values. Up to three PCI bridges count, because two
// devices below one switch may share a root port and an upper switch as well.
const (
	nearNode    = 1
	nearRoot    = 2 * nearNode
	nearBridge  = 2 * nearRoot
	maxBridges  = 3
	nearFabric  = (maxBridges + 1) * nearBridge
	nearLink    = 2 * nearFabric
	nearSilicon = 2 * nearLink
)

// Nearness returns a larger number for closer places. Partitions of one physical device come first,
// then places with a private link, places with a common fabric of such links, places with a common
// PCI bridge (a switch has a bridge at its top; the closer switch shares more bridges), a common
// PCIe root, and a common NUMA node.
func Nearness(a, b *Place) int {
	near := 0
	if common(a.silicon, b.silicon) {
		near += nearSilicon
	}
	if common(a.linked, b.names) || common(b.linked, a.names) {
		near += nearLink
	}
	if a.fabric != "" && a.fabric == b.fabric {
		near += nearFabric
	}
	bridges := 0
	for bridges < min(len(a.bridges), len(b.bridges), maxBridges) && a.bridges[bridges] == b.bridges[bridges] {
		bridges++
	}
	near += bridges * nearBridge
	if a.root != "" && a.root == b.root {
		near += nearRoot
	}
	if common(a.numa, b.numa) {
		near += nearNode
	}
	return near
}

// common reports whether two lists have an element in common.
func common[T comparable](a, b []T) bool {
	return slices.ContainsFunc(a, func(element T) bool { return slices.Contains(b, element) })
}

// OrderSilicon returns the names of physical devices so that close devices follow each other: a
// consumer that takes the first few gets close devices. The order begins with the first name, and
// continues with the device closest to the previous one. If several are equally close, the device
// closest to all chosen devices wins. The members of an aligned group follow each other. The result
// is the same for the same devices.
func OrderSilicon(devices []discovery.Device, groups Groups) []string {
	wholes := make(map[string][]*discovery.Device)
	for i := range devices {
		d := &devices[i]
		wholes[d.Silicon()] = append(wholes[d.Silicon()], d)
	}
	places := make(map[string]*Place, len(wholes))
	for name, whole := range wholes {
		places[name] = PlaceOf(whole...)
	}
	return orderNearest(places, groups)
}

// orderNearest implements the order of [OrderSilicon]. The running time grows with the square of
// the number of names.
func orderNearest(places map[string]*Place, groups Groups) []string {
	names := slices.Sorted(maps.Keys(places))
	at := make([]*Place, len(names))
	for i, name := range names {
		at[i] = places[name]
	}
	pull := make([]int, len(names)) // sum of the nearness to all chosen devices
	chosen := make([]bool, len(names))
	var order []string
	for last := -1; len(order) < len(names); {
		next, near := -1, -1
		var own []Group // groups of the last device
		if last >= 0 {
			own = groups[names[last]]
		}
		for i := range names {
			if chosen[i] {
				continue
			}
			to := 0
			if last >= 0 {
				to = Nearness(at[last], at[i])*(len(groupSizes)+1) + countWith(own, names[i])
				pull[i] += to
			}
			if next < 0 || to > near || to == near && pull[i] > pull[next] {
				next, near = i, to
			}
		}
		chosen[next], last = true, next
		order = append(order, names[next])
	}
	return order
}
