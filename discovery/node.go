package discovery

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
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

// CheckNode returns a device node as it is on the host, and reports how that is not as an
// edit says. It may be another device's, made before the kernel gave out other numbers.
func CheckNode(edit *specs.DeviceNode, info fs.FileInfo) (*specs.DeviceNode, error) {
	name, wanted := cmp.Or(edit.HostPath, edit.Path), edit.Type
	if wanted == "u" {
		wanted = "c" // the same, unbuffered
	}
	found := &specs.DeviceNode{Path: name, Type: nodeType(info.Mode())}
	if found.Type == "" || wanted != "" && found.Type != wanted {
		return nil, fmt.Errorf("device node %s is of type %v on the host, want %q", name, info.Mode().Type(), wanted)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || found.Type == "p" {
		return found, nil // a file system that has no numbers
	}
	found.Major, found.Minor = int64(unix.Major(uint64(stat.Rdev))), int64(unix.Minor(uint64(stat.Rdev)))
	numbered := edit.Major != 0 || edit.Minor != 0
	if numbered && (found.Major != edit.Major || found.Minor != edit.Minor) {
		return nil, fmt.Errorf("device node %s is %d:%d on the host, want %d:%d", name, found.Major, found.Minor, edit.Major, edit.Minor)
	}
	return found, nil
}

// nodeType returns the type of a device node as CDI writes it, "" if the file is
// no device node.
func nodeType(mode fs.FileMode) string {
	switch {
	case mode&fs.ModeCharDevice != 0:
		return "c"
	case mode&fs.ModeDevice != 0:
		return "b"
	case mode&fs.ModeNamedPipe != 0:
		return "p"
	}
	return ""
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
