package pci

import (
	"io/fs"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// SetPlaceLists adds the lists of a device's location in the machine: the NUMA nodes as near as its
// own, and the PCIe roots of a device with several functions.
func SetPlaceLists(host *discovery.Host, devices []discovery.Device) {
	near := make(map[int64]resourceapi.DeviceAttribute) // by NUMA node
	for i := range devices {
		d := &devices[i]
		if node := d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode].IntValue; node != nil {
			if _, known := near[*node]; !known {
				near[*node] = nodesNear(host, *node)
			}
			if list := near[*node]; len(list.IntValues) > 1 {
				d.SetList(deviceattribute.StandardDeviceAttributeNUMANode, list)
			}
		}
		if roots := pcieRoots(host, d); len(roots) > 1 {
			d.SetList(deviceattribute.StandardDeviceAttributePCIeRoot, resourceapi.DeviceAttribute{StringValues: roots})
		}
	}
}

// nodesNear returns a NUMA node and the nearest nodes of its socket, by the distances in the
// firmware's table (Documentation/ABI/stable/sysfs-devices-node).
func nodesNear(host *discovery.Host, node int64) resourceapi.DeviceAttribute {
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
func pcieRoots(host *discovery.Host, d *discovery.Device) (roots []string) {
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
