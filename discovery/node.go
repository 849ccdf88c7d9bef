package discovery

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
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

// DeviceName converts the kernel's name of a device to a DNS label: "pci-0000-03-00-0" for the PCI
// function "0000:03:00.0", and "vhost-net" for itself.
func DeviceName(d sysfs.Device) string {
	if sysfs.IsPCIAddress(d.Name()) {
		return "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(d.Name())
	}
	return strings.NewReplacer(":", "-", ".", "-", "_", "-", "!", "-").Replace(strings.ToLower(d.Name()))
}

// Node returns the edit that gives a container the kernel's node of a device. dir is the directory
// of the node if the kernel does not report one: "/dev/dri". The edit contains the device numbers
// if known, so that a later check can detect and refuse a changed node. If the numbers are
// unreadable, Node returns the edit without them and an error.
func Node(d sysfs.Device, dir string) (*specs.DeviceNode, error) {
	node, err := d.Node(dir)
	edit := &specs.DeviceNode{Path: node.Path, HostPath: node.Path, Permissions: "rw"}
	if err != nil {
		return edit, fmt.Errorf("device node %s: %w", node.Path, err)
	}
	if node.Major == 0 && node.Minor == 0 {
		return edit, nil
	}
	edit.Major, edit.Minor, edit.Type = node.Major, node.Minor, "c"
	if node.Block {
		edit.Type = "b"
	}
	return edit, nil
}

// PermitMknod allows a container to create the nodes as well ("mrw"). The device plugins of some
// families do so, and software with its own /dev expects the permission.
func PermitMknod(nodes []*specs.DeviceNode) {
	for _, node := range nodes {
		node.Permissions = "mrw"
	}
}

// NodeHealth checks in the host's /dev whether the nodes of a device exist and have the device's
// numbers. NodeHealth opens no node.
func NodeHealth(host *Host, nodes []*specs.DeviceNode) Health {
	if len(nodes) == 0 {
		return Health{Status: Unhealthy, Condition: ConditionNodeMissing, Reason: "the kernel has no device node for it"}
	}
	for _, node := range nodes {
		info, err := fs.Stat(host.FS, strings.TrimPrefix(node.HostPath, "/"))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return MissingNodeHealth(node.HostPath)
		case err != nil:
			return Health{Status: Unknown, Reason: fmt.Sprintf("device node %s cannot be looked at: %v", node.HostPath, err)}
		case nodeType(info.Mode()) != "": // otherwise an ordinary file of a recorded host
			if _, err := CheckNode(node, info); err != nil {
				return Health{Status: Unhealthy, Condition: ConditionNodeMissing, Reason: err.Error()}
			}
		}
	}
	return Health{Status: Healthy}
}
