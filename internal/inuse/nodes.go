package inuse

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

// open returns the processes that have a node of the function open.
func (v *View) open(function sysfs.Device) (uses Uses) {
	nodes, err := v.nodes(function)
	if err != nil {
		return Uses{{Object: "a node", Unseen: err}}
	}
	seen := make(map[string]bool)
	for _, node := range nodes {
		for _, key := range []string{node.path, node.numbers} {
			if who, ok := v.opened.by[key]; ok && key != "" && !seen[node.path] {
				seen[node.path] = true
				uses = append(uses, Use{Object: node.path, How: who + " has it open"})
			}
		}
	}
	if len(nodes) > 0 && v.opened.err != nil {
		uses = append(uses, Use{Object: nodes[0].path, Unseen: v.opened.err})
	}
	return uses
}

// node is a device node. Its numbers are as of numbersOf, "" if they are not
// known.
type node struct{ path, numbers string }

// nodes returns the nodes that are the function's alone: those that the kernel
// has below it, those of its IOMMU group, and those that a family knows of.
func (v *View) nodes(function sysfs.Device) (nodes []node, err error) {
	r := &reader{FS: v.host.FS}
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
		return nil, fmt.Errorf("list its nodes: %w", r.err)
	}
	for _, n := range vfio {
		if !slices.Contains(discovery.VFIOControl(), n.HostPath) {
			add(n)
		}
	}
	for _, d := range v.known {
		if !Within(d.Source, function) {
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

// opened are the device nodes that processes have open.
type opened struct {
	// A process for each node. A node is here by its path, if that is below /dev,
	// and by its numbers, since a container may have it under any path.
	by  map[string]string
	err error // why there may be more
}

// openNodes returns what is open. Processes that except names do not count.
func openNodes(host *discovery.Host, except func(process int) bool) *opened {
	o := &opened{by: make(map[string]string)}
	entries, err := fs.ReadDir(host.FS, "proc")
	if err != nil {
		o.err = fmt.Errorf("list processes: %w", err)
		return o
	}
	processes, forbidden := 0, 0
	for _, entry := range entries {
		process, err := strconv.ParseUint(entry.Name(), 10, 31)
		if err != nil {
			continue
		}
		found, err := o.read(host, entry.Name(), except != nil && except(int(process)))
		switch {
		case errors.Is(err, fs.ErrPermission):
			forbidden++
		case err != nil && o.err == nil:
			o.err = err
		}
		if found {
			processes++
		}
	}
	switch {
	case o.err != nil:
	case forbidden > 0:
		o.err = fmt.Errorf("the open files of %d processes may not be seen: %w", forbidden, fs.ErrPermission)
	case processes == 0:
		o.err = errors.New("list processes: there are none in /proc")
	}
	return o
}

// read adds what a process has open, unless it does not count, and reports whether
// there is such a process.
func (o *opened) read(host *discovery.Host, process string, except bool) (found bool, err error) {
	for _, dir := range openDirs(host.FS, process) {
		files, err := fs.ReadDir(host.FS, dir)
		if err != nil && ended(host.FS, dir, err) {
			continue
		}
		if except {
			return true, nil
		}
		if err != nil {
			return true, fmt.Errorf("list open files of process %s: %w", process, err)
		}
		found = true
		for _, file := range files {
			link := path.Join(dir, file.Name())
			keys, err := keysOf(host.FS, link)
			if err != nil && !ended(host.FS, link, err) {
				return true, fmt.Errorf("read an open file of process %s: %w", process, err)
			}
			for _, key := range keys {
				if o.by[key] == "" {
					name, _ := host.ReadText("/proc/" + process + "/comm") // for people
					o.by[key] = fmt.Sprintf("process %s (%s)", process, name)
				}
			}
		}
	}
	return found, nil
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
