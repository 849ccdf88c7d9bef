package discovery

import (
	"errors"
	"fmt"
	"path"
	"strconv"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery/sysfs"
)

// VFIO returns the edits that give a container a function that is bound to a
// vfio driver: the node of its IOMMU group and /dev/vfio/vfio, through which a
// group is used (Documentation/driver-api/vfio.rst). As with [Node], what could
// not be read of their numbers is the error; without a group there are none.
//
// A group is given whole: where several functions are in one, whoever has one
// of them has them all.
func VFIO(host *Host, function sysfs.Device) ([]*specs.DeviceNode, error) {
	name := function.Link("iommu_group")
	if name == "" {
		return nil, errors.New("vfio: in no IOMMU group")
	}
	if _, err := strconv.ParseUint(name, 10, 32); err != nil {
		return nil, fmt.Errorf("vfio: IOMMU group %q: not a number", name)
	}
	// Where there is no IOMMU and the administrator allows vfio nevertheless,
	// the kernel makes a group of this name for each function.
	attrs := sysfs.At(host.FS, path.Join("sys/kernel/iommu_groups", name)).Attrs()
	if kind, _ := attrs.Text("name"); kind == "vfio-noiommu" {
		name = "noiommu-" + name
	}
	if err := attrs.Err(); err != nil {
		return nil, fmt.Errorf("vfio: IOMMU group %s: %w", name, err)
	}
	group, groupErr := Node(sysfs.At(host.FS, path.Join("sys/class/vfio", name)), "/dev/vfio")
	control, controlErr := Node(sysfs.At(host.FS, "sys/class/misc/vfio"), "/dev/vfio")
	return []*specs.DeviceNode{group, control}, errors.Join(groupErr, controlErr)
}
