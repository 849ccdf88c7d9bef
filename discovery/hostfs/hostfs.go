// Package hostfs opens a directory as the root of a host's file system for discovery. The package
// does not interpret the files.
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

// Open opens the host with the root dir.
//
// Unlike the file system of [os.DirFS], the returned file system does not leave the directory: all
// links, including absolute links, are resolved on the host. If the kernel does not support
// openat2(2), before Linux 5.6, or forbids openat2, links are resolved on this machine.
//
// Only regular files and directories can be opened. Opening a device node could have effects, such
// as starting a watchdog, and opening a FIFO waits for a writer. So the type of a file is checked
// before the file is opened.
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

// HasProc reports whether the kernel's own proc is mounted on a host's /proc: the host is this
// machine, and not a copy of this or another machine.
func HasProc(host fs.FS) bool {
	f, ok := host.(interface {
		is(name string, magic int64) bool
	})
	return ok && f.is("proc", unix.PROC_SUPER_MAGIC)
}

// HasSys reports whether the kernel's own sysfs is mounted on a host's /sys, so that the events of
// this machine's kernel concern the host.
func HasSys(host fs.FS) bool {
	f, ok := host.(interface {
		is(name string, magic int64) bool
	})
	return ok && f.is("sys", unix.SYSFS_MAGIC)
}

// is reports whether a file system of that type is mounted on a directory.
func (f *hostFS) is(name string, magic int64) bool {
	fd, err := f.openat("open", name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	var stat unix.Statfs_t
	return unix.Fstatfs(fd, &stat) == nil && stat.Type == magic
}

// errNoFile is the error for opening a device node, a FIFO or a socket.
var errNoFile = errors.New("neither a regular file nor a directory")

// plainFS is a file system of [os.DirFS] that opens only regular files and directories.
type plainFS struct {
	dirFS

	dir string
}

func newPlainFS(dir string) plainFS { return plainFS{os.DirFS(dir).(dirFS), dir} }

// dirFS is the set of methods of the [os.DirFS] file system.
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
	root  *os.File // O_PATH; closed by the runtime when unreferenced
	sysfs bool     // sys is the kernel's sysfs, without device nodes or links to other file systems
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
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN): // a concurrent rename
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

// readOnly contains the flags for reading a file.
const readOnly = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC

func (f *hostFS) openFile(name string) (int, error) { return f.openat("open", name, readOnly) }

// openChecked opens a regular file or a directory.
func (f *hostFS) openChecked(name string) (int, error) {
	return f.reopenChecked("open", name, readOnly, func(stat *unix.Stat_t) error {
		if kind := stat.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFDIR {
			return errNoFile
		}
		return nil
	})
}

// reopenChecked opens a file after checking its type. It opens the checked file even if another
// process has replaced it since.
func (f *hostFS) reopenChecked(op, name string, flags int, check func(*unix.Stat_t) error) (int, error) {
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

// Stat implements [fs.StatFS]. It follows links but opens no file.
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
	return f.wrapEntries(name, entries), err
}

// wrapEntries wraps directory entries so that their Info method uses the host.
func (f *hostFS) wrapEntries(dir string, listed []fs.DirEntry) []fs.DirEntry {
	for i, entry := range listed {
		listed[i] = dirEntry{DirEntry: entry, fsys: f, path: path.Join(dir, entry.Name())}
	}
	return listed
}

// dirEntry looks up its information on the host. An entry of package os would use this process's
// working directory.
type dirEntry struct {
	fs.DirEntry

	fsys *hostFS
	path string
}

func (e dirEntry) Info() (fs.FileInfo, error) { return e.fsys.Lstat(e.path) }

// OpenDevice opens the character device node with the given numbers on a host, for reading and
// writing, and returns an error for any other file. Families only read files; this function is for
// the few that make requests to a driver. A host that is not a directory of this machine has no
// such nodes.
func OpenDevice(host fs.FS, name string, major, minor int64) (*os.File, error) {
	return openNode(host, name, unix.S_IFCHR, major, minor, unix.O_RDWR)
}

// OpenDisk opens the block device node with the given numbers on a host, for reading. With
// exclusive, the error is EBUSY if the kernel itself uses the disk: for a file system, as swap, or
// as a part of another device (bd_may_claim in block/bdev.c). A process that has the disk
// open does not cause the error.
func OpenDisk(host fs.FS, name string, major, minor int64, exclusive bool) (*os.File, error) {
	flags := unix.O_RDONLY
	if exclusive {
		flags |= unix.O_EXCL
	}
	return openNode(host, name, unix.S_IFBLK, major, minor, flags)
}

func openNode(host fs.FS, name string, kind uint32, major, minor int64, flags int) (*os.File, error) {
	f, ok := hostDirectory(host)
	if !ok {
		return nil, &fs.PathError{Op: "open device", Path: name, Err: errors.ErrUnsupported}
	}
	flags |= unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC
	fd, err := f.reopenChecked("open device", name, flags, func(stat *unix.Stat_t) error {
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

// hostDirectory returns the directory of this machine that contains the host's files, without any
// overlay.
func hostDirectory(host fs.FS) (*hostFS, bool) {
	if o, ok := host.(*Overlay); ok {
		host = o.base
	}
	f, ok := host.(*hostFS)
	return f, ok
}

// StatOpened describes the target file of a link in /proc/PID/fd, even if the file is outside the
// host's root. It opens no file, and sends no request to the server of a network file system.
func StatOpened(host fs.FS, name string) (fs.FileInfo, error) {
	f, ok := hostDirectory(host)
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

// openedInfo contains the type and the device numbers of a file from statx(2).
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

// file is an open file. It is not an os.File, because that would use the runtime's poller for a
// file that never blocks. The poller would have no benefit here, and costs as much as the read.
type file struct {
	fsys *hostFS
	fd   int
	name string
	dir  *os.File // set while a directory is being read
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
	opened, err := f.duplicate()
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
		if f.dir, err = f.duplicate(); err != nil {
			return nil, err
		}
	}
	entries, err := f.dir.ReadDir(n)
	return f.fsys.wrapEntries(f.name, entries), err
}

// duplicate returns a duplicate of the open file as a file of package os.
func (f *file) duplicate() (*os.File, error) {
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
