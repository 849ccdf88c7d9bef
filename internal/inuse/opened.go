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

// opened are the device nodes and similar files that processes have open.
type opened struct {
	// users maps an open file to a process. The key of a device node is its numbers, because a
	// container may use any name, and also its path if that is below /dev. For other keys, see keysOf
	// and keysWithin.
	users map[string]string

	vfio string // a process with an unidentified function open through vfio
	err  error  // reason why the list may be incomplete

	sharesFiles func(thread, other string) bool // reports whether two threads share one file table, false if unknown
}

// initialPIDs is the namespace of all processes (PROC_PID_INIT_INO in include/linux/proc_ns.h).
const initialPIDs = "pid:[4026531836]"

// openNodes returns the open files. It ignores the processes of except.
func openNodes(host *discovery.Host, except func(process string) bool) *opened {
	o := newOpened(host.FS)
	entries, err := fs.ReadDir(host.FS, "proc")
	if err != nil {
		o.err = fmt.Errorf("list processes: %w", err)
		return o
	}
	o.err = VisibilityOfAll(host.FS)
	processes, forbidden := 0, 0
	for _, entry := range entries {
		if _, err := strconv.ParseUint(entry.Name(), 10, 31); err != nil {
			continue
		}
		found, err := o.read(host, entry.Name(), except(entry.Name()))
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
	return &opened{users: make(map[string]string), sharesFiles: sharesFiles(host)}
}

// read adds the open files of a process, unless except is set, and reports whether the process
// exists. Threads may have a file table of their own (CLONE_FILES in clone(2)). Most threads share
// the table of the process, which is read once.
func (o *opened) read(host *discovery.Host, process string, except bool) (found bool, err error) {
	who := "process " + process
	if name, _ := host.ReadText("/proc/" + process + "/comm"); name != "" { // for messages
		who += " (" + name + ")"
	}
	var tables []string // threads with a table of their own
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
	// After the first thread of a process has ended, the process's memory is visible through another
	// thread: /proc has a directory for each thread (proc_pid_lookup in fs/proc/base.c, Linux 6.12).
	mapped := process
	if len(tables) > 0 && tables[0] != process {
		mapped = tables[0]
	}
	isThere, err := o.readDir(host.FS, path.Join("proc", mapped, "map_files"), process, who, except)
	return len(tables) > 0 || isThere, err
}

// threadsOf returns the threads of a process. The first thread has the number of the process.
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

// readDir adds the open files of a directory of links, and reports whether the directory exists.
// The end of a thread removes its directory.
func (o *opened) readDir(host fs.FS, dir, process, who string, except bool) (isThere bool, err error) {
	files, err := fs.ReadDir(host, dir)
	switch {
	case err != nil && hasEnded(host, dir, err):
		return false, nil
	case except:
		return true, nil
	case err != nil:
		return true, fmt.Errorf("list open files of process %s: %w", process, err)
	}
	for _, file := range files {
		link := path.Join(dir, file.Name())
		if err := o.add(host, link, who); err != nil && !hasEnded(host, link, err) {
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
		if o.users[key] == "" {
			o.users[key] = who
		}
	}
	return err
}

// Files that let a process map and drive a PCI function: the kernel's resource files in sysfs, and
// the older files in /proc.
var (
	resource = regexp.MustCompile(`/(devices/.*)/resource[0-9]+(?:_wc)?$`)
	procPCI  = regexp.MustCompile(`/bus/pci/(?:([0-9a-f]{4}):)?([0-9a-f]{2})/([0-9a-f]{2}\.[0-7])$`)
)

// keysOf returns the keys of an open file that may be a device node: "b 259:1" and
// "/dev/nvme0n1p1". The key of a PCI function that is open as a whole is its directory in sysfs, or
// its address.
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

// keysWithin returns the keys of the files behind an anonymous descriptor. A function that was
// opened through vfio has such a descriptor even if its group is closed; the kernel names the
// function since Linux 6.17 (vfio_device_show_fdinfo in drivers/vfio/vfio_main.c). Files that were
// registered with an io_uring are in no table of the process, but the kernel lists their names
// (io_uring/fdinfo.c).
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

// formatNumbers formats the numbers of a device node, "b 259:1", or returns "" if both are 0.
func formatNumbers(block bool, major, minor int64) string {
	switch {
	case major == 0 && minor == 0:
		return ""
	case block:
		return fmt.Sprintf("b %d:%d", major, minor)
	}
	return fmt.Sprintf("c %d:%d", major, minor)
}

// numbersOf returns the formatted numbers of a device node, "" for another file.
func numbersOf(info fs.FileInfo) string {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode()&fs.ModeDevice == 0 {
		return ""
	}
	return formatNumbers(info.Mode()&fs.ModeCharDevice == 0, int64(unix.Major(stat.Rdev)), int64(unix.Minor(stat.Rdev)))
}
