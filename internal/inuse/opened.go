package inuse

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
)

// opened are the device nodes, and what is like them, that processes have open.
type opened struct {
	// A process for each thing that one has open. A device node is here by its
	// numbers, since a container may have it under any name, and by its path, if
	// that is below /dev. For others, see keysOf and keysWithin.
	by map[string]string

	vfio string // a process that has a function open by vfio, and nothing says which function
	err  error  // why there may be more

	sharesFiles func(thread, other string) bool // reports that two threads have one table of files; false where that is not known
}

// initialPIDs is the namespace of all processes (PROC_PID_INIT_INO in
// include/linux/proc_ns.h).
const initialPIDs = "pid:[4026531836]"

// openNodes returns what is open. Processes that except names do not count.
func openNodes(host *discovery.Host, except func(process int) bool) *opened {
	o := newOpened(host.FS)
	entries, err := fs.ReadDir(host.FS, "proc")
	if err != nil {
		o.err = fmt.Errorf("list processes: %w", err)
		return o
	}
	o.err = SightOfAll(host.FS)
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

func newOpened(host fs.FS) *opened {
	return &opened{by: make(map[string]string), sharesFiles: sharesFiles(host)}
}

// read adds what a process has open, unless it does not count, and reports whether there is such a process. Threads may
// have a table of files of their own (CLONE_FILES in clone(2)); most have that of the process, which is read once.
func (o *opened) read(host *discovery.Host, process string, except bool) (found bool, err error) {
	who := "process " + process
	if name, _ := host.ReadText("/proc/" + process + "/comm"); name != "" { // for people
		who += " (" + name + ")"
	}
	var tables []string // threads whose files were read
	for _, thread := range threadsOf(host.FS, process) {
		if slices.ContainsFunc(tables, func(other string) bool { return o.sharesFiles(thread, other) }) {
			continue
		}
		dir := path.Join("proc", process, "task", thread, "fd")
		if thread == process {
			dir = path.Join("proc", process, "fd")
		}
		isThere, err := o.readDir(host.FS, dir, process, who, except)
		if isThere {
			tables = append(tables, thread)
		}
		if err != nil || isThere && except {
			return true, err
		}
	}
	// The memory of a process whose first thread has ended is seen through another one: /proc has a directory for
	// each thread (proc_pid_lookup in fs/proc/base.c, Linux 6.12).
	mapped := process
	if len(tables) > 0 && tables[0] != process {
		mapped = tables[0]
	}
	isThere, err := o.readDir(host.FS, path.Join("proc", mapped, "map_files"), process, who, except)
	return len(tables) > 0 || isThere, err
}

// threadsOf returns the threads of a process, of which the first one has the number of the process.
func threadsOf(host fs.FS, process string) []string {
	threads := []string{process}
	entries, _ := fs.ReadDir(host, path.Join("proc", process, "task"))
	for _, entry := range entries {
		if entry.Name() != process {
			threads = append(threads, entry.Name())
		}
	}
	return threads
}

// readDir adds what a directory of links to open files has, and reports whether there is such a directory, which the end
// of its thread removes.
func (o *opened) readDir(host fs.FS, dir, process, who string, except bool) (isThere bool, err error) {
	files, err := fs.ReadDir(host, dir)
	switch {
	case err != nil && ended(host, dir, err):
		return false, nil
	case except:
		return true, nil
	case err != nil:
		return true, fmt.Errorf("list open files of process %s: %w", process, err)
	}
	for _, file := range files {
		link := path.Join(dir, file.Name())
		if err := o.add(host, link, who); err != nil && !ended(host, link, err) {
			return true, fmt.Errorf("read an open file of process %s: %w", process, err)
		}
	}
	return true, nil
}

// add adds an open file.
func (o *opened) add(host fs.FS, link, who string) error {
	target, err := fs.ReadLink(host, link)
	if err != nil {
		return err
	}
	keys, err := keysOf(host, link, target)
	if err == nil && len(keys) == 0 {
		keys, err = o.keysWithin(host, link, target, who)
	}
	for _, key := range keys {
		if o.by[key] == "" {
			o.by[key] = who
		}
	}
	return err
}

// PCI functions as files that a process can map and drive the function by: the
// kernel's resource files in sysfs, and the older ones in /proc.
var (
	resource = regexp.MustCompile(`/(devices/.*)/resource[0-9]+(?:_wc)?$`)
	procPCI  = regexp.MustCompile(`/bus/pci/(?:([0-9a-f]{4}):)?([0-9a-f]{2})/([0-9a-f]{2}\.[0-7])$`)
)

// keysOf returns by what an open file is there, if it may be a device node: "b 259:1"
// and "/dev/nvme0n1p1". A PCI function that is open as a whole is there by its
// directory in sysfs, or by its address.
func keysOf(host fs.FS, link, target string) (keys []string, err error) {
	if !path.IsAbs(target) { // "socket:[4711]"
		return nil, nil
	}
	if strings.HasPrefix(target, "/dev/") {
		keys = append(keys, target)
	}
	if found := resource.FindStringSubmatch(target); found != nil {
		keys = append(keys, "sys/"+found[1])
	}
	if found := procPCI.FindStringSubmatch(target); found != nil {
		domain := found[1]
		if domain == "" {
			domain = "0000"
		}
		keys = append(keys, domain+":"+found[2]+":"+found[3])
	}
	info, err := hostfs.StatOpened(host, link)
	if err == nil && numbersOf(info) != "" {
		keys = append(keys, numbersOf(info))
	}
	return keys, err
}

// keysWithin returns what lies behind a descriptor that is no file of a file system. A
// function that was opened by vfio has one even if its group is closed; the kernel says
// which function it is since Linux 6.17 (vfio_device_show_fdinfo in
// drivers/vfio/vfio_main.c). Files that were registered with an io_uring are in no
// table of the process, and the kernel says their names (io_uring/fdinfo.c).
func (o *opened) keysWithin(host fs.FS, link, target, who string) (keys []string, err error) {
	switch target {
	case "anon_inode:[vfio-device]", "anon_inode:[io_uring]":
	default:
		return nil, nil
	}
	info := path.Join(path.Dir(path.Dir(link)), "fdinfo", path.Base(link))
	text, err := textOf(host, info)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		value = strings.TrimSpace(value)
		_, notNumber := strconv.ParseUint(name, 10, 32)
		switch {
		case target == "anon_inode:[io_uring]" && notNumber == nil && value != "":
			keys = append(keys, "/dev/"+strings.TrimPrefix(value, "/dev/"))
		case name == "vfio-device-syspath":
			keys = append(keys, strings.TrimPrefix(value, "/"))
		}
	}
	if len(keys) == 0 && target == "anon_inode:[vfio-device]" && o.vfio == "" {
		o.vfio = who
	}
	return keys, nil
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
