package pci

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// VFIONodes returns a container's edits for a function or a mediated device under a vfio driver.
// There are two interfaces, and a kernel may have either or both
// (Documentation/driver-api/vfio.rst):
//
//   - by the IOMMU group (CONFIG_VFIO_GROUP): /dev/vfio/42, through /dev/vfio/vfio;
//   - by the device itself (CONFIG_VFIO_DEVICE_CDEV): /dev/vfio/devices/vfio0,
//     through /dev/iommu.
//
// VFIONodes returns only nodes listed in sysfs. As with [discovery.Node], unreadable numbers are an
// error. No node at all is an error.
//
// An IOMMU group is allocated as a whole: a container with any function of the group has all
// functions, and gets the nodes of all.
func VFIONodes(host *discovery.Host, function sysfs.Device) ([]*specs.DeviceNode, error) {
	var nodes []*specs.DeviceNode
	var errs []error
	add := func(d sysfs.Device, dir string) {
		node, err := discovery.Node(d, dir)
		nodes, errs = append(nodes, node), append(errs, err)
	}
	members := []sysfs.Device{function}
	if name := function.Link("iommu_group"); name != "" {
		if _, err := strconv.ParseUint(name, 10, 32); err != nil {
			return nil, fmt.Errorf("%w: IOMMU group %q: not a number", ErrVFIO, name)
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
			// A kernel without such nodes has the directory, but no numbers in it. The
			// same is true for functions without an IOMMU (vfio_device_add in
			// drivers/vfio/vfio.h).
			if cdev.HasEntry("dev") || cdev.Uevent()["DEVNAME"] != "" {
				add(cdev, "/dev/vfio/devices")
			}
		}
	}
	byDevice := len(nodes) > before
	switch {
	case !byGroup && !byDevice:
		return nil, withoutVFIONode(function)
	case !hasIOMMU && (!byGroup || !hasControl):
		errs = append(errs, ErrNoVFIOControl)
	case hasIOMMU && (byDevice || !hasControl): // a group can be used through /dev/iommu too (iommufd's VFIO compatibility)
		add(sysfs.At(host.FS, iommu), "/dev")
	}
	return nodes, errors.Join(errs...)
}

// The errors of [VFIONodes], apart from errors of reads.
var (
	ErrVFIO          = errors.New("vfio") // all errors below are an ErrVFIO
	ErrNoIOMMUGroup  = fmt.Errorf("%w: the device has no IOMMU group", ErrVFIO)
	ErrNoVFIOControl = fmt.Errorf("%w: the kernel has no control node for it: neither /dev/vfio/vfio nor /dev/iommu", ErrVFIO) // a process must open one of them before the device
	errNoVFIONode    = fmt.Errorf("%w: the kernel has no node for the device or for its IOMMU group", ErrVFIO)
)

// withoutVFIONode returns why a function under vfio has no node.
func withoutVFIONode(function sysfs.Device) error {
	if function.Link("iommu_group") == "" {
		return ErrNoIOMMUGroup
	}
	return errNoVFIONode
}

// groupNode returns the kernel device that has the node of an IOMMU group. The device's name has a
// prefix if the host has no IOMMU and the administrator allows vfio nevertheless (vfio_create_group
// in drivers/vfio/group.c). The name of the group does not show that: it is "vfio-noiommu" for
// mediated devices too.
func groupNode(host *discovery.Host, group string) (sysfs.Device, bool) {
	for _, name := range []string{"noiommu-" + group, group} {
		if node := path.Join("sys/class/vfio", name); mayExist(host, node) {
			return sysfs.At(host.FS, node), true
		}
	}
	return sysfs.Device{}, false
}

// groupMembers returns the functions of an IOMMU group, sorted by name. The result always contains
// known.
func groupMembers(host *discovery.Host, group string, known sysfs.Device) (members []sysfs.Device) {
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

// mayExist reports whether a file exists or its absence cannot be established.
func mayExist(host *discovery.Host, name string) bool {
	_, err := fs.Stat(host.FS, name)
	return !errors.Is(err, fs.ErrNotExist)
}

// VFIOControl returns the nodes needed for any IOMMU group or function under vfio. Families with
// [VFIONodes] list them as CommonNodes.
func VFIOControl() []string { return []string{"/dev/vfio/vfio", "/dev/iommu"} }
