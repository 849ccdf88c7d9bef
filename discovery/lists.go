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

// SetNames sets an attribute to several names. As a string they have commas
// between, and are left out where they are longer together than the API's limit,
// since some of them would say that there are no others. As a list, which has no
// such limit, they are among the Lists if there is more than one; unless one is
// longer by itself.
func (d *Device) SetNames(name resourceapi.QualifiedName, names []string) {
	if value := strings.Join(names, ","); len(value) <= resourceapi.DeviceAttributeMaxValueLength {
		d.Attributes.SetString(name, value)
	}
	long := func(name string) bool { return len(name) > resourceapi.DeviceAttributeMaxValueLength }
	if len(names) > 1 && !slices.ContainsFunc(names, long) {
		d.setList(name, resourceapi.DeviceAttribute{StringValues: names})
	}
}

// Names returns the names that an attribute was set to, nil if there are none, or
// none are known since they were too many for a string and one too long for a list.
func (d *Device) Names(name resourceapi.QualifiedName) []string {
	if list := d.Lists[name].StringValues; list != nil {
		return list
	}
	if value := d.Attributes.String(name); value != "" {
		return strings.Split(value, ",")
	}
	return nil
}

// setList sets a list. Devices that were copied from one another have theirs.
func (d *Device) setList(name resourceapi.QualifiedName, list resourceapi.DeviceAttribute) {
	d.Lists = maps.Clone(d.Lists)
	if d.Lists == nil {
		d.Lists = make(Attributes)
	}
	d.Lists[name] = list
}

// setPlaces adds the lists of where devices are in the machine: the NUMA nodes
// that are as near as their own, and the PCIe roots of those that consist of
// several functions.
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
		if roots := d.roots(host); len(roots) > 1 {
			d.setList(deviceattribute.StandardDeviceAttributePCIeRoot, resourceapi.DeviceAttribute{StringValues: roots})
		}
	}
}

// nodesNear returns a NUMA node and those of its socket that are nearest to it,
// as the firmware's table of distances says (Documentation/ABI/stable/
// sysfs-devices-node).
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

// roots returns the PCIe roots of all that the device consists of, its own first.
func (d *Device) roots(host *Host) (roots []string) {
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
