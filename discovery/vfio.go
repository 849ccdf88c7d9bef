package discovery

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery/sysfs"
)

// VFIO returns the edits by which a container uses a function, or a mediated
// device, that is bound to a vfio driver. There are two ways, and a kernel may
// have either or both (Documentation/driver-api/vfio.rst):
//
//   - by the IOMMU group (CONFIG_VFIO_GROUP): /dev/vfio/42, through /dev/vfio/vfio;
//   - by the device itself (CONFIG_VFIO_DEVICE_CDEV): /dev/vfio/devices/vfio0,
//     through /dev/iommu.
//
// Only nodes that the kernel has in sysfs are named. As with [Node], the error is
// what could not be read of their numbers. Without a node there is an error.
//
// A group is given whole: whoever has one of its functions has them all, and gets
// the nodes of all.
func VFIO(host *Host, function sysfs.Device) ([]*specs.DeviceNode, error) {
	var nodes []*specs.DeviceNode
	var errs []error
	add := func(d sysfs.Device, dir string) {
		node, err := Node(d, dir)
		nodes, errs = append(nodes, node), append(errs, err)
	}
	members := []sysfs.Device{function}
	if name := function.Link("iommu_group"); name != "" {
		if _, err := strconv.ParseUint(name, 10, 32); err != nil {
			return nil, fmt.Errorf("vfio: IOMMU group %q: not a number", name)
		}
		if node, ok := groupNode(host, name); ok {
			add(node, "/dev/vfio")
		}
		members = groupMembers(host, name, function)
	}
	byGroup := len(nodes) > 0
	const control, iommu = "sys/class/misc/vfio", "sys/class/misc/iommu"
	hasControl, hasIOMMU := mayExist(host, control), mayExist(host, iommu)
	if byGroup && hasControl {
		add(sysfs.At(host.FS, control), "/dev/vfio")
	}
	before := len(nodes)
	for _, member := range members {
		for _, cdev := range member.Children("vfio-dev") {
			// A kernel without such nodes has the directory, and no numbers
			// in it; nor have functions without an IOMMU (vfio_device_add in
			// drivers/vfio/vfio.h).
			if cdev.Exists("dev") || cdev.Uevent()["DEVNAME"] != "" {
				add(cdev, "/dev/vfio/devices")
			}
		}
	}
	byDevice := len(nodes) > before
	switch {
	case !byGroup && !byDevice && function.Link("iommu_group") == "":
		return nil, errors.New("vfio: in no IOMMU group")
	case !byGroup && !byDevice:
		return nil, errors.New("vfio: the kernel has no node for it, nor for its IOMMU group")
	case !hasIOMMU && (!byGroup || !hasControl):
		errs = append(errs, errors.New("vfio: the kernel has no node that it could be used through"))
	case hasIOMMU && (byDevice || !hasControl): // which a group is used through too (iommufd's VFIO compatibility)
		add(sysfs.At(host.FS, iommu), "/dev")
	}
	return nodes, errors.Join(errs...)
}

// groupNode returns the kernel device that has the node of an IOMMU group. Its
// name has a prefix where there is no IOMMU and the administrator allows vfio
// nevertheless (vfio_create_group in drivers/vfio/group.c). The group's own name
// does not tell: it is "vfio-noiommu" for mediated devices too.
func groupNode(host *Host, group string) (sysfs.Device, bool) {
	for _, name := range []string{"noiommu-" + group, group} {
		if node := path.Join("sys/class/vfio", name); mayExist(host, node) {
			return sysfs.At(host.FS, node), true
		}
	}
	return sysfs.Device{}, false
}

// groupMembers returns the functions of an IOMMU group, in the order of their
// names, at least the one that is known to be in it.
func groupMembers(host *Host, group string, known sysfs.Device) (members []sysfs.Device) {
	dir := path.Join("sys/kernel/iommu_groups", group, "devices")
	entries, _ := fs.ReadDir(host.FS, dir)
	found := false
	for _, entry := range entries {
		if member, ok := sysfs.At(host.FS, dir).LinkTo(entry.Name()); ok {
			members = append(members, member)
			found = found || member.Path == known.Path
		}
	}
	if !found {
		members = append(members, known)
	}
	return members
}

// mayExist reports whether a host has a file, or it cannot be told.
func mayExist(host *Host, name string) bool {
	_, err := fs.Stat(host.FS, name)
	return !errors.Is(err, fs.ErrNotExist)
}
