package inuse

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"syscall"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// open returns the processes, and the kernel's own servers, with an open node of the function.
func (v *View) open(function sysfs.Device) (uses Uses) {
	nodes, err := v.functionNodes(function)
	if err != nil {
		return Uses{{Object: "a node", ReadError: err}}
	}
	uses = v.openNodes(nodes)
	for key, who := range v.opened.users {
		if key == function.Name() || IsWithin(key, function) {
			uses = append(uses, Use{Object: "function " + function.Name(), How: who + " has it open as a whole"})
		}
	}
	return append(uses, v.hiddenGroup(function)...)
}

// openNodes returns the users of open nodes.
func (v *View) openNodes(nodes []node) (uses Uses) {
	seen := make(map[string]bool) // several keys can lead to one node
	for _, node := range nodes {
		for _, key := range []string{node.numbers, node.path} {
			who, ok := v.opened.users[key]
			if ok && key != "" && !seen[node.path] && !seen[node.numbers] {
				uses = append(uses, Use{Object: node.path, How: who + " has it open"})
				seen[node.path], seen[node.numbers] = true, node.numbers != ""
			}
		}
		if user, ok := v.disks.users[node.numbers]; ok && strings.HasPrefix(node.numbers, "c ") {
			uses = append(uses, Use{Object: node.path, How: user})
		}
	}
	if len(nodes) > 0 && v.opened.err != nil {
		uses = append(uses, Use{Object: nodes[0].path, ReadError: v.opened.err})
	}
	return uses
}

// hiddenGroup reports whether the function's IOMMU group is open. It is needed if a process uses a
// function through vfio and the kernel does not show which one. hiddenGroup tries to open the
// group: the kernel refuses a second open, and a group is open while one of its functions is open
// (in vfio_group_fops_open and vfio_device_open of Linux 5.16 to 6.18).
func (v *View) hiddenGroup(function sysfs.Device) Uses {
	if v.opened.vfio == "" {
		return nil
	}
	var uses Uses
	for _, node := range v.groupNodes(&reader{FS: v.host.FS}, function) {
		file, err := hostfs.OpenDevice(v.host.FS, strings.TrimPrefix(node.Path, "/"), node.Major, node.Minor)
		switch {
		case err == nil:
			file.Close()
		case errors.Is(err, syscall.EBUSY):
			uses = append(uses, Use{Object: node.Path, How: "a program has it open, perhaps " + v.opened.vfio})
		default:
			uses = append(uses, Use{Object: node.Path, ReadError: fmt.Errorf("%s has a function open by vfio, and it is unknown which: %w", v.opened.vfio, err)})
		}
	}
	return uses
}

// node is a device node. Its numbers have the format of numbers, "" if unknown.
type node struct{ path, numbers string }

func nodeOf(n sysfs.Node) node { return node{n.Path, formatNumbers(n.Block, n.Major, n.Minor)} }

// functionNodes returns the nodes of this function only: the kernel's nodes below the function and
// below the function's disks elsewhere in sysfs, the nodes of the function's IOMMU group, and nodes
// that a family reports.
func (v *View) functionNodes(function sysfs.Device) (nodes []node, err error) {
	r := &reader{FS: v.host.FS}
	dirs := []string{function.Path}
	for _, disk := range v.disks.disksOn(function) {
		if !isBelow(disk, function) {
			// The character device of the namespace is a sibling: ng0n1.
			generic := path.Join(path.Dir(disk.Path), strings.Replace(disk.Name(), "nvme", "ng", 1))
			dirs = append(dirs, disk.Path, generic)
		}
	}
	for _, dir := range dirs {
		_ = fs.WalkDir(r, dir, func(name string, entry fs.DirEntry, _ error) error {
			if entry != nil && !entry.IsDir() && entry.Name() == "dev" {
				found, err := sysfs.At(r, path.Dir(name)).Node("/dev")
				r.noteError(err)
				nodes = append(nodes, nodeOf(found))
			}
			return nil // r keeps the error
		})
	}
	for _, group := range v.groupNodes(r, function) {
		nodes = append(nodes, nodeOf(group))
	}
	add := func(n *specs.DeviceNode) {
		nodes = append(nodes, node{n.HostPath, formatNumbers(n.Type == "b", n.Major, n.Minor)})
	}
	vfio, _ := pci.VFIONodes(&discovery.Host{FS: r}, sysfs.At(r, function.Path)) // an error means: not bound to vfio
	if r.err != nil {
		return nil, fmt.Errorf("list its nodes: %w", r.err)
	}
	for _, n := range vfio {
		if !slices.Contains(pci.VFIOControl(), n.HostPath) {
			add(n)
		}
	}
	for _, d := range v.known {
		if !IsWithin(d.Source, function) {
			continue
		}
		for _, n := range d.OwnNodes() {
			add(n)
		}
	}
	return nodes, nil
}

// groupNodes returns the nodes of the IOMMU groups of the function and of the mediated devices on
// the function, under any driver.
func (v *View) groupNodes(r *reader, function sysfs.Device) (nodes []sysfs.Node) {
	for _, member := range append([]sysfs.Device{function.In(r)}, mediatedDevices(r, function)...) {
		group := member.Link("iommu_group")
		for _, prefix := range []string{"", "noiommu-"} {
			d := sysfs.At(r, path.Join("sys/class/vfio", prefix+group))
			if group == "" || !d.HasEntry("dev") {
				continue
			}
			node, err := d.Node("/dev/vfio")
			r.noteError(err)
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// mediatedDevices returns the mediated devices on a function.
func mediatedDevices(r *reader, function sysfs.Device) (found []sysfs.Device) {
	for _, child := range function.In(r).Children(".") {
		if child.HasEntry("mdev_type") {
			found = append(found, child)
		}
	}
	return found
}
