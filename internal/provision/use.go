package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/sysfs"
)

// uses tells whether a PCI function is in use, as far as the files of the host
// tell. If they do not tell, the function counts as in use.
type uses struct {
	host  *discovery.Host
	known []discovery.Device

	held      map[string]string // who holds a device, by its name
	heldErr   error             // why that is not known
	opened    map[string]string // which process has a node of /dev open, by its path and its numbers
	openedErr error
	disks     *disks
	nets      *nets
}

// readUses reads what is in use now.
func readUses(host *discovery.Host, known []discovery.Device, held Held) *uses {
	u := &uses{host: host, known: known, disks: readDisks(host), nets: readNets(host)}
	u.held, u.heldErr = held(known)
	u.opened, u.openedErr = openNodes(host)
	return u
}

// of returns who uses a function, or nil if nobody does. If the function is to be
// unbound from its driver, an interface that is up counts as use too: it is
// prepared for use, and would be gone.
func (u *uses) of(function sysfs.Device, unbind bool) error {
	if err := u.holder(function); err != nil {
		return err
	}
	if err := u.disks.below(function); err != nil {
		return err
	}
	if err := u.nets.below(function, unbind); err != nil {
		return err
	}
	if unbind {
		if err := u.bridged(function); err != nil {
			return err
		}
	}
	return u.open(function)
}

// holder tells whether a container has the function, or a part of it.
func (u *uses) holder(function sysfs.Device) error {
	if u.heldErr != nil {
		return fmt.Errorf("whether a container has it cannot be told: %w", u.heldErr)
	}
	name := discovery.DeviceName(function)
	for device, who := range u.held {
		if device == name || strings.HasPrefix(device, name+"-") || u.isOn(device, function) {
			return fmt.Errorf("in use: %s has %s", who, device)
		}
	}
	return nil
}

// isOn reports whether a device lies on the function, by whatever name: a mediated
// device is called by its UUID.
func (u *uses) isOn(device string, function sysfs.Device) bool {
	for i := range u.known {
		if d := &u.known[i]; d.Name == device && within(d.Source, function) {
			return true
		}
	}
	uuid, mediated := strings.CutPrefix(device, "mdev-")
	return mediated && function.Exists(uuid)
}

// bridged tells whether a PCI function is behind this one.
func (u *uses) bridged(function sysfs.Device) error {
	r := &reader{FS: u.host.FS}
	for _, entry := range r.list(function.Path) {
		if entry.IsDir() && sysfs.IsPCIAddress(entry.Name()) {
			return fmt.Errorf("in use: %s is behind it", entry.Name())
		}
	}
	if r.err != nil {
		return fmt.Errorf("whether a function is behind it cannot be told: %w", r.err)
	}
	return nil
}

// open tells whether a process has a node of the function open.
func (u *uses) open(function sysfs.Device) error {
	nodes, err := u.nodes(function)
	if err != nil {
		return err
	}
	if len(nodes) > 0 && u.openedErr != nil {
		return fmt.Errorf("whether it is in use cannot be told: %w", u.openedErr)
	}
	for _, node := range nodes {
		for _, key := range []string{node.path, node.numbers} {
			if who, ok := u.opened[key]; ok && key != "" {
				return fmt.Errorf("in use: %s has %s open", who, node.path)
			}
		}
	}
	return nil
}

// node is a device node. Its numbers are as of numbersOf, "" if they are not
// known.
type node struct{ path, numbers string }

// nodes returns the nodes that are the function's alone: those that the kernel
// has below it, those of its IOMMU group, and those that a family knows of.
func (u *uses) nodes(function sysfs.Device) (nodes []node, err error) {
	r := &reader{FS: u.host.FS}
	_ = fs.WalkDir(r, function.Path, func(name string, entry fs.DirEntry, _ error) error {
		if entry != nil && !entry.IsDir() && entry.Name() == "dev" {
			found, err := sysfs.At(r, path.Dir(name)).Node("/dev")
			r.note(err)
			nodes = append(nodes, node{found.Path, numbers(found.Block, found.Major, found.Minor)})
		}
		return nil // r has the error
	})
	add := func(n *specs.DeviceNode) {
		nodes = append(nodes, node{n.HostPath, numbers(n.Type == "b", n.Major, n.Minor)})
	}
	vfio, _ := discovery.VFIO(&discovery.Host{FS: r}, sysfs.At(r, function.Path)) // or it is not bound to vfio
	if r.err != nil {
		return nil, fmt.Errorf("whether it is in use cannot be told: list its nodes: %w", r.err)
	}
	for _, n := range vfio {
		if !slices.Contains(discovery.VFIOControl(), n.HostPath) {
			add(n)
		}
	}
	for _, d := range u.known {
		if !within(d.Source, function) {
			continue
		}
		for _, n := range d.OwnNodes() {
			add(n)
		}
	}
	return nodes, nil
}

// numbers returns what names a device node by its numbers, "b 259:1", or "" if
// they are not known.
func numbers(block bool, major, minor int64) string {
	switch {
	case major == 0 && minor == 0:
		return ""
	case block:
		return fmt.Sprintf("b %d:%d", major, minor)
	}
	return fmt.Sprintf("c %d:%d", major, minor)
}

// numbersOf returns what numbers does of a device node, "" of another file.
func numbersOf(info fs.FileInfo) string {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode()&fs.ModeDevice == 0 {
		return ""
	}
	return numbers(info.Mode()&fs.ModeCharDevice == 0, int64(unix.Major(stat.Rdev)), int64(unix.Minor(stat.Rdev)))
}

// openNodes returns the device nodes that processes have open, and a process
// that does. A node is there by its path, if that is below /dev, and by its
// numbers, since a container may have it under any path.
func openNodes(host *discovery.Host) (map[string]string, error) {
	entries, err := fs.ReadDir(host.FS, "proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	opened := make(map[string]string)
	processes := 0
	for _, entry := range entries {
		if _, err := strconv.ParseUint(entry.Name(), 10, 32); err != nil {
			continue
		}
		found := false
		for _, dir := range openDirs(host.FS, entry.Name()) {
			files, err := fs.ReadDir(host.FS, dir)
			if err != nil && ended(host.FS, dir, err) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("list open files of process %s: %w", entry.Name(), err)
			}
			found = true
			for _, file := range files {
				link := path.Join(dir, file.Name())
				keys, err := keysOf(host.FS, link)
				if err != nil && !ended(host.FS, link, err) {
					return nil, fmt.Errorf("read an open file of process %s: %w", entry.Name(), err)
				}
				for _, key := range keys {
					if opened[key] == "" {
						name, _ := host.ReadText("/proc/" + entry.Name() + "/comm") // for people
						opened[key] = fmt.Sprintf("process %s (%s)", entry.Name(), name)
					}
				}
			}
		}
		if found {
			processes++
		}
	}
	if processes == 0 {
		return nil, errors.New("list processes: there are none in /proc")
	}
	return opened, nil
}

// openDirs returns the directories of links to what a process has open: its files, what
// it has mapped, and the files of threads, which may have a table of their own
// (proc_pid_fd(5), proc_pid_map_files(5), CLONE_FILES in clone(2)).
func openDirs(host fs.FS, process string) []string {
	dirs := []string{path.Join("proc", process, "fd"), path.Join("proc", process, "map_files")}
	threads, _ := fs.ReadDir(host, path.Join("proc", process, "task"))
	for _, thread := range threads {
		if thread.Name() != process {
			dirs = append(dirs, path.Join("proc", process, "task", thread.Name(), "fd"))
		}
	}
	return dirs
}

// keysOf returns by what an open file is there, if it may be a device node.
func keysOf(host fs.FS, link string) (keys []string, err error) {
	target, err := fs.ReadLink(host, link)
	if err != nil || !path.IsAbs(target) { // "socket:[4711]"
		return nil, err
	}
	if strings.HasPrefix(target, "/dev/") {
		keys = append(keys, target)
	}
	info, err := hostfs.StatOpened(host, link)
	if err == nil && numbersOf(info) != "" {
		keys = append(keys, numbersOf(info))
	}
	return keys, err
}

// below reports whether a kernel device is on the function, or is it.
func below(d, function sysfs.Device) bool { return within(d.Path, function) }

// within reports whether a path is the function's directory, or lies in it.
func within(name string, function sysfs.Device) bool {
	return name == function.Path || strings.HasPrefix(name, function.Path+"/")
}
