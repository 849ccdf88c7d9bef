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

// DRMNodes returns the nodes of the kernel's graphics subsystem for a device: the card nodes, then
// the render nodes. As with [Node], unreadable numbers are an error.
func DRMNodes(d sysfs.Device) (nodes []*specs.DeviceNode, err error) {
	var errs []error
	for _, minor := range append(d.NumberedChildren("drm", "card"), d.NumberedChildren("drm", "renderD")...) {
		node, err := Node(minor, "/dev/dri")
		nodes, errs = append(nodes, node), append(errs, err)
	}
	return nodes, errors.Join(errs...)
}

// SharedNode describes a device whose node any number of containers may use at once, such as
// /dev/kvm. It sets the name, the node and the health, and the kernel's name as the model. dir and
// the error are those of [Node].
func SharedNode(host *Host, misc sysfs.Device, dir string) (Device, error) {
	d := Device{
		Name:       DeviceName(misc),
		Source:     misc.Path,
		Attributes: Attributes{},
		Shareable:  true,
	}
	d.Attributes.SetString("model", misc.Name())
	node, err := Node(misc, dir)
	d.Edits.DeviceNodes = []*specs.DeviceNode{node}
	d.Health = NodeHealth(host, d.Edits.DeviceNodes)
	return d, err
}

// CheckNode compares a device node of the host with an edit. CheckNode returns the node as found,
// and an error if type or numbers differ: the node may belong to another device, if the kernel has
// assigned new numbers since.
func CheckNode(edit *specs.DeviceNode, info fs.FileInfo) (*specs.DeviceNode, error) {
	name, wanted := cmp.Or(edit.HostPath, edit.Path), edit.Type
	if wanted == "u" {
		wanted = "c" // "u" is an unbuffered character device
	}
	found := &specs.DeviceNode{Path: name, Type: nodeType(info.Mode())}
	if found.Type == "" || wanted != "" && found.Type != wanted {
		return nil, fmt.Errorf("device node %s is of type %v on the host, want %q", name, info.Mode().Type(), wanted)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || found.Type == "p" {
		return found, nil // the file system has no device numbers
	}
	found.Major, found.Minor = int64(unix.Major(uint64(stat.Rdev))), int64(unix.Minor(uint64(stat.Rdev)))
	numbered := edit.Major != 0 || edit.Minor != 0
	if numbered && (found.Major != edit.Major || found.Minor != edit.Minor) {
		return nil, fmt.Errorf("device node %s is %d:%d on the host, want %d:%d", name, found.Major, found.Minor, edit.Major, edit.Minor)
	}
	return found, nil
}

// nodeType returns the type of a device node as CDI writes it, or "" if the file is not a device
// node.
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

// CountedIDs returns count device plugin IDs for a device with count containers: the prefix
// followed by a number from 0.
func CountedIDs(prefix string, count int) []string {
	ids := make([]string, count)
	for i := range ids {
		ids[i] = prefix + strconv.Itoa(i)
	}
	return ids
}

// VFIOControl returns the nodes needed for any IOMMU group or function under vfio. Families with
// [VFIONodes] list them as CommonNodes.
func VFIOControl() []string { return []string{"/dev/vfio/vfio", "/dev/iommu"} }
