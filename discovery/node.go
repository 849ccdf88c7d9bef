package discovery

import (
	"errors"
	"strconv"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery/sysfs"
)

// DRMNodes returns the nodes that the kernel's graphics subsystem has for a
// device: the cards, then the render nodes. As with [Node], what could not be
// read of their numbers is the error.
func DRMNodes(d sysfs.Device) (nodes []*specs.DeviceNode, err error) {
	var errs []error
	for _, minor := range append(d.Numbered("drm", "card"), d.Numbered("drm", "renderD")...) {
		node, err := Node(minor, "/dev/dri")
		nodes, errs = append(nodes, node), append(errs, err)
	}
	return nodes, errors.Join(errs...)
}

// SharedNode returns what is to be said of a device whose node any number of
// containers may have at once, such as /dev/kvm: its name, node and health, and
// as its model what the kernel calls it. dir and the error are those of [Node].
func SharedNode(host *Host, misc sysfs.Device, dir string) (Device, error) {
	d := Device{
		Name:       DeviceName(misc),
		Source:     misc.Path,
		Attributes: Attributes{},
		Open:       true,
	}
	d.Attributes.SetString("model", misc.Name())
	node, err := Node(misc, dir)
	d.Edits.DeviceNodes = []*specs.DeviceNode{node}
	d.Health = NodeHealth(host, d.Edits.DeviceNodes)
	return d, err
}

// CountedIDs returns as many classic IDs, which are the prefix and a number from
// 0, for a device that so many containers may have.
func CountedIDs(prefix string, count int) []string {
	ids := make([]string, count)
	for i := range ids {
		ids[i] = prefix + strconv.Itoa(i)
	}
	return ids
}

// VFIOControl returns the nodes through which all IOMMU groups and functions
// under vfio are used. They are CommonNodes of the families that use [VFIO].
func VFIOControl() []string { return []string{"/dev/vfio/vfio", "/dev/iommu"} }
