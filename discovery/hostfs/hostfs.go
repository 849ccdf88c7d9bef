// Package hostfs opens a directory as the root of a host's file system, for
// discovery to read. It knows nothing about the files in it.
package hostfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Open opens the host whose root is dir.
//
// Unlike the file system of [os.DirFS], that of Open keeps to the directory:
// links, absolute ones too, mean what they mean on the host, and lead nowhere
// else. Where the kernel has no openat2(2), before Linux 5.6, or it is
// forbidden, links lead where they lead on this machine.
//
// Only regular files and directories can be opened. Opening a device node would
// already do something, such as start a watchdog, and a FIFO would wait for a
// writer. So the kind of a file is looked at before the file is opened.
func Open(dir string) (fs.FS, error) {
	root, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("host root: %w", err)
	}
	f := &hostFS{root: root}
	probe, err := f.openat("open", ".", unix.O_PATH)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		return newPlainFS(dir), root.Close()
	}
	if err != nil {
		return nil, err
	}
	f.sysfs = f.is("sys", unix.SYSFS_MAGIC)
	return f, unix.Close(probe)
}

// HasProc reports whether the kernel's own proc is mounted on a host's /proc:
// the host is this machine, and not a copy of it or of another.
func HasProc(host fs.FS) bool {
	f, ok := host.(interface {
		is(name string, magic int64) bool
	})
	return ok && f.is("proc", unix.PROC_SUPER_MAGIC)
}

// HasSys reports whether the kernel's own sysfs is mounted on a host's /sys, so that
// the events of this machine's kernel are about it.
func HasSys(host fs.FS) bool {
	f, ok := host.(interface {
		is(name string, magic int64) bool
	})
	return ok && f.is("sys", unix.SYSFS_MAGIC)
}

// is reports whether a file system of that kind is mounted on a directory.
func (f *hostFS) is(name string, magic int64) bool {
	fd, err := f.openat("open", name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	var stat unix.Statfs_t
	return unix.Fstatfs(fd, &stat) == nil && stat.Type == magic
}

// errNoFile is why a device node, a FIFO or a socket is not opened.
var errNoFile = errors.New("neither a regular file nor a directory")

// plainFS is a file system of [os.DirFS] that opens regular files and
// directories only.
type plainFS struct {
	dirFS

	dir string
}

func newPlainFS(dir string) plainFS { return plainFS{os.DirFS(dir).(dirFS), dir} }

// dirFS are the methods that the file system of [os.DirFS] has.
type dirFS interface {
	fs.ReadLinkFS
	fs.ReadDirFS
	fs.StatFS
}

func (f plainFS) is(name string, magic int64) bool {
	var stat unix.Statfs_t
	return unix.Statfs(filepath.Join(f.dir, name), &stat) == nil && stat.Type == magic
}

func (f plainFS) Open(name string) (fs.File, error) {
	info, err := f.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "open", Path: name, Err: errNoFile}
	}
	return f.dirFS.Open(name)
}

// hostFS is a host's file system.
type hostFS struct {
	root  *os.File // O_PATH; closed when nothing refers to it any more
	sysfs bool     // sys is the kernel's, which has no device nodes and no links to other file systems
}

var (
	_ fs.ReadLinkFS = &hostFS{}
	_ fs.ReadDirFS  = &hostFS{}
	_ fs.StatFS     = &hostFS{}
)

// openat opens a path below the root.
func (f *hostFS) openat(op, name string, flags uint64) (int, error) {
	if !fs.ValidPath(name) {
		return -1, &fs.PathError{Op: op, Path: name, Err: fs.ErrInvalid}
	}
	how := &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	for {
		fd, err := unix.Openat2(int(f.root.Fd()), name, how)
		switch {
		case err == nil:
			return fd, nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN): // a rename on the way
			continue
		default:
			return -1, &fs.PathError{Op: op, Path: name, Err: err}
		}
	}
}

// Open implements [fs.FS].
func (f *hostFS) Open(name string) (fs.File, error) {
	open := f.openChecked
	if f.sysfs && strings.HasPrefix(name, "sys/") {
		open = f.openFile
	}
	fd, err := open(name)
	if err != nil {
		return nil, err
	}
	return &file{fsys: f, fd: fd, name: name}, nil
}

// readOnly are the flags that a file is read with.
const readOnly = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC

func (f *hostFS) openFile(name string) (int, error) { return f.openat("open", name, readOnly) }

// openChecked opens a file that is a regular file or a directory.
func (f *hostFS) openChecked(name string) (int, error) {
	return f.reopen("open", name, readOnly, func(stat *unix.Stat_t) error {
		if kind := stat.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFDIR {
			return errNoFile
		}
		return nil
	})
}

// reopen opens a file whose kind was looked at and found good. It opens that very
// file, and not one that another process has put in its place since.
func (f *hostFS) reopen(op, name string, flags int, check func(*unix.Stat_t) error) (int, error) {
	found, err := f.openat(op, name, unix.O_PATH)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(found) }()
	var stat unix.Stat_t
	if err = unix.Fstat(found, &stat); err == nil {
		err = check(&stat)
	}
	if err == nil {
		var fd int
		if fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", found), flags, 0); err == nil {
			return fd, nil
		}
	}
	return -1, &fs.PathError{Op: op, Path: name, Err: err}
}

// Stat implements [fs.StatFS]. It follows links and opens nothing.
func (f *hostFS) Stat(name string) (fs.FileInfo, error) { return f.info("stat", name, 0) }

// Lstat implements [fs.ReadLinkFS].
func (f *hostFS) Lstat(name string) (fs.FileInfo, error) {
	return f.info("lstat", name, unix.O_NOFOLLOW)
}

func (f *hostFS) info(op, name string, flags uint64) (fs.FileInfo, error) {
	fd, err := f.openat(op, name, unix.O_PATH|flags)
	if err != nil {
		return nil, err
	}
	opened := os.NewFile(uintptr(fd), name)
	defer opened.Close()
	return opened.Stat()
}

// ReadLink implements [fs.ReadLinkFS].
func (f *hostFS) ReadLink(name string) (string, error) {
	fd, err := f.openat("readlink", name, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	target := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", target)
	if err != nil {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: err}
	}
	return string(target[:n]), nil
}

// ReadDir implements [fs.ReadDirFS]. The entries are in name order.
func (f *hostFS) ReadDir(name string) ([]fs.DirEntry, error) {
	fd, err := f.openat("open", name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	opened := os.NewFile(uintptr(fd), name)
	defer opened.Close()
	entries, err := opened.ReadDir(-1)
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return f.entries(name, entries), err
}

// entries returns the entries of a directory as this host's.
func (f *hostFS) entries(dir string, listed []fs.DirEntry) []fs.DirEntry {
	for i, entry := range listed {
		listed[i] = dirEntry{DirEntry: entry, fsys: f, path: path.Join(dir, entry.Name())}
	}
	return listed
}

// dirEntry looks its information up on the host. An entry of package os would
// look it up in this process's working directory.
type dirEntry struct {
	fs.DirEntry

	fsys *hostFS
	path string
}

func (e dirEntry) Info() (fs.FileInfo, error) { return e.fsys.Lstat(e.path) }

// OpenDevice opens the character device node of a host that has these numbers,
// for reading and writing. Anything else it does not open. Families read what is
// in files; this is for the few that must ask a driver to do something. A host
// that is no directory of this machine has no such nodes.
func OpenDevice(host fs.FS, name string, major, minor int64) (*os.File, error) {
	return openNode(host, name, unix.S_IFCHR, major, minor, unix.O_RDWR)
}

// OpenDisk opens the block device node of a host that has these numbers, for reading.
// If it is to be exclusive, the error is EBUSY where the kernel itself uses the disk:
// for a file system, as swap, or as a part of another device (bd_may_claim in
// block/bdev.c). A process that merely has it open does not count.
func OpenDisk(host fs.FS, name string, major, minor int64, exclusive bool) (*os.File, error) {
	flags := unix.O_RDONLY
	if exclusive {
		flags |= unix.O_EXCL
	}
	return openNode(host, name, unix.S_IFBLK, major, minor, flags)
}

func openNode(host fs.FS, name string, kind uint32, major, minor int64, flags int) (*os.File, error) {
	f, ok := directory(host)
	if !ok {
		return nil, &fs.PathError{Op: "open device", Path: name, Err: errors.ErrUnsupported}
	}
	flags |= unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC
	fd, err := f.reopen("open device", name, flags, func(stat *unix.Stat_t) error {
		if stat.Mode&unix.S_IFMT != kind || stat.Rdev != unix.Mkdev(uint32(major), uint32(minor)) {
			return fmt.Errorf("not the %s device %d:%d", map[uint32]string{unix.S_IFCHR: "character", unix.S_IFBLK: "block"}[kind], major, minor)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// directory returns the directory of this machine that a host is, below what is laid
// over it.
func directory(host fs.FS) (*hostFS, bool) {
	if o, ok := host.(*Overlay); ok {
		host = o.base
	}
	f, ok := host.(*hostFS)
	return f, ok
}

// StatOpened describes the file that a link in /proc/PID/fd leads to, wherever
// the process has it from. It opens nothing, and asks no server of a network file
// system for what the kernel knows.
func StatOpened(host fs.FS, name string) (fs.FileInfo, error) {
	f, ok := directory(host)
	if !ok {
		return fs.Stat(host, name)
	}
	dir, err := f.openat("stat", path.Dir(name), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(dir) }()
	var stat unix.Statx_t
	if err := unix.Statx(dir, path.Base(name), unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &stat); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	return openedInfo{memoryInfo{name: path.Base(name)}, stat}, nil
}

// openedInfo is what statx(2) says of the kind of a file and its numbers.
type openedInfo struct {
	memoryInfo

	stat unix.Statx_t
}

func (i openedInfo) Mode() fs.FileMode {
	switch i.stat.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return fs.ModeDevice
	case unix.S_IFCHR:
		return fs.ModeDevice | fs.ModeCharDevice
	case unix.S_IFDIR:
		return fs.ModeDir
	case unix.S_IFREG:
		return 0
	}
	return fs.ModeIrregular
}

func (i openedInfo) Sys() any {
	return &syscall.Stat_t{Rdev: unix.Mkdev(i.stat.Rdev_major, i.stat.Rdev_minor)}
}

// file is an open file. It is no os.File, since that would use the runtime's
// poller for a file that does not block. The poller is of no use here, and costs
// as much as the read.
type file struct {
	fsys *hostFS
	fd   int
	name string
	dir  *os.File // if it is a directory that is being read
}

func (f *file) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(f.fd, p)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, &fs.PathError{Op: "read", Path: f.name, Err: err}
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

func (f *file) Stat() (fs.FileInfo, error) {
	opened, err := f.again()
	if err != nil {
		return nil, err
	}
	defer opened.Close()
	return opened.Stat()
}

// ReadDir implements [fs.ReadDirFile].
func (f *file) ReadDir(n int) ([]fs.DirEntry, error) {
	if f.dir == nil {
		var err error
		if f.dir, err = f.again(); err != nil {
			return nil, err
		}
	}
	entries, err := f.dir.ReadDir(n)
	return f.fsys.entries(f.name, entries), err
}

// again returns what is open as a file of package os.
func (f *file) again() (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(f.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.name, err)
	}
	return os.NewFile(uintptr(fd), f.name), nil
}

func (f *file) Close() error {
	if f.dir != nil {
		f.dir.Close()
	}
	return unix.Close(f.fd)
}
