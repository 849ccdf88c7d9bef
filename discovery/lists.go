package discovery

import (
	"io/fs"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery/sysfs"
)

// SetNames sets an attribute to several names. The string value joins the names with commas. It is
// left out if the text exceeds the API's length limit, because a shortened text would hide names.
// Several names are also set as a list, which has no limit for the total length, unless a name
// exceeds the limit alone.
func (d *Device) SetNames(name resourceapi.QualifiedName, names []string) {
	if value := strings.Join(names, ","); len(value) <= resourceapi.DeviceAttributeMaxValueLength {
		d.Attributes.SetString(name, value)
	}
	long := func(name string) bool { return len(name) > resourceapi.DeviceAttributeMaxValueLength }
	if len(names) > 1 && !slices.ContainsFunc(names, long) {
		d.setList(name, resourceapi.DeviceAttribute{StringValues: names})
	}
}

// Names returns the names set by [Device.SetNames]. The result is nil without any names, or if the
// names exceeded the limits of both the string and the list.
func (d *Device) Names(name resourceapi.QualifiedName) []string {
	if list := d.Lists[name].StringValues; list != nil {
		return list
	}
	if value := d.Attributes.String(name); value != "" {
		return strings.Split(value, ",")
	}
	return nil
}

// setList sets a list. Copies of a device share the map, so setList clones the map first.
func (d *Device) setList(name resourceapi.QualifiedName, list resourceapi.DeviceAttribute) {
	d.Lists = maps.Clone(d.Lists)
	if d.Lists == nil {
		d.Lists = make(Lists)
	}
	d.Lists[name] = list
}

// setPlaces adds the lists of a device's location in the machine: the NUMA nodes as near as its
// own, and the PCIe roots of a device with several functions.
func setPlaces(host *Host, devices []Device) {
	near := make(map[int64]resourceapi.DeviceAttribute) // by NUMA node
	for i := range devices {
		d := &devices[i]
		if node := d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode].IntValue; node != nil {
			if _, known := near[*node]; !known {
				near[*node] = nodesNear(host, *node)
			}
			if list := near[*node]; len(list.IntValues) > 1 {
				d.setList(deviceattribute.StandardDeviceAttributeNUMANode, list)
			}
		}
		if roots := d.pcieRoots(host); len(roots) > 1 {
			d.setList(deviceattribute.StandardDeviceAttributePCIeRoot, resourceapi.DeviceAttribute{StringValues: roots})
		}
	}
}

// nodesNear returns a NUMA node and the nearest nodes of its socket, by the distances in the
// firmware's table (Documentation/ABI/stable/sysfs-devices-node).
func nodesNear(host *Host, node int64) resourceapi.DeviceAttribute {
	sys, err := fs.Sub(host.FS, "sys")
	links, ok := sys.(fs.ReadLinkFS)
	if err != nil || !ok {
		return resourceapi.DeviceAttribute{}
	}
	list, err := deviceattribute.GetNUMANodeAttribute(int(node), deviceattribute.ListAttribute, deviceattribute.WithFS(links))
	if err != nil {
		return resourceapi.DeviceAttribute{}
	}
	return list.Value
}

// pcieRoots returns the PCIe roots of all functions of the device. The root of d.Source is first.
func (d *Device) pcieRoots(host *Host) (roots []string) {
	if len(d.Includes) == 0 {
		return nil
	}
	for _, dir := range append([]string{d.Source}, d.Includes...) {
		if root := sysfs.At(host.FS, dir).PCIRoot(); root != "" && !slices.Contains(roots, root) {
			roots = append(roots, root)
		}
	}
	return roots
}
