package recorded

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
)

// FS returns the host as a file system in memory. FS creates and opens no files, so a recorded host
// from an untrusted source cannot affect this machine.
//
// Links are resolved on the host: ".." above its root is the root. A device node has its numbers
// and cannot be opened. An entry that was unreadable when the host was recorded is a directory;
// reading it fails with the recorded reason.
func (h *Host) FS() fs.FS {
	m := memory{".": {entry: entry{path: ".", kind: directory}}}
	for _, e := range h.entries {
		m.makeDirectory(path.Dir(e.path)).add(path.Base(e.path))
		if known := m[e.path]; known != nil && e.kind == directory {
			continue // an entry below the directory came first
		}
		m[e.path] = &inode{entry: e}
	}
	for _, i := range m {
		slices.Sort(i.names)
		i.names = slices.Compact(i.names)
	}
	return m
}

// memory is a recorded host in memory, by path.
type memory map[string]*inode

var (
	_ fs.ReadLinkFS = memory{}
	_ fs.ReadDirFS  = memory{}
	_ fs.StatFS     = memory{}
)

// inode is an entry of a recorded host in memory. It implements [fs.FileInfo].
type inode struct {
	entry

	names []string // names of a directory's entries
}

func (i *inode) add(name string) { i.names = append(i.names, name) }

// makeDirectory returns the directory with the given path. It creates missing directories,
// including parents.
func (m memory) makeDirectory(name string) *inode {
	if i := m[name]; i != nil {
		return i
	}
	m.makeDirectory(path.Dir(name)).add(path.Base(name))
	m[name] = &inode{entry: entry{path: name, kind: directory}}
	return m[name]
}

// maxLinks is the number of links that are followed on one path (MAXSYMLINKS in
// include/linux/namei.h).
const maxLinks = 40

// walk returns the entry of a path. It follows the links on the path, and a link in the last
// element if follow is true.
func (m memory) walk(op, name string, follow bool) (*inode, error) {
	fail := func(err error) (*inode, error) { return nil, &fs.PathError{Op: op, Path: name, Err: err} }
	if !fs.ValidPath(name) {
		return fail(fs.ErrInvalid)
	}
	at, rest := m["."], strings.Split(name, "/")
	for links := 0; len(rest) > 0; {
		element := rest[0]
		rest = rest[1:]
		if at.kind != directory && at.kind != unreadable {
			return fail(syscall.ENOTDIR)
		}
		below := strings.TrimPrefix(path.Join("/", at.path, element), "/")
		next := m[cmp.Or(below, ".")] // ".." above the root is the root
		switch {
		case next == nil:
			return fail(fs.ErrNotExist)
		case next.kind == link && (follow || len(rest) > 0):
			if links++; links > maxLinks {
				return fail(syscall.ELOOP)
			}
			rest = append(strings.Split(next.target, "/"), rest...)
		default:
			at = next
		}
	}
	return at, nil
}

// Open implements [fs.FS].
func (m memory) Open(name string) (fs.File, error) {
	i, err := m.walk("open", name, true)
	switch {
	case err != nil:
		return nil, err
	case i.kind == node:
		return nil, &fs.PathError{Op: "open", Path: name, Err: errors.New("a device node of a recorded host")}
	}
	return &memoryFile{inode: i, host: m, name: name, data: bytes.NewReader(i.data)}, nil
}

// Stat implements [fs.StatFS].
func (m memory) Stat(name string) (fs.FileInfo, error) { return m.info("stat", name, true) }

// Lstat implements [fs.ReadLinkFS].
func (m memory) Lstat(name string) (fs.FileInfo, error) { return m.info("lstat", name, false) }

func (m memory) info(op, name string, follow bool) (fs.FileInfo, error) {
	i, err := m.walk(op, name, follow)
	if err != nil {
		return nil, err
	}
	return info{i, path.Base(name)}, nil
}

// ReadLink implements [fs.ReadLinkFS].
func (m memory) ReadLink(name string) (string, error) {
	i, err := m.walk("readlink", name, false)
	if err != nil {
		return "", err
	}
	if i.kind != link {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrInvalid}
	}
	return i.target, nil
}

// ReadDir implements [fs.ReadDirFS].
func (m memory) ReadDir(name string) ([]fs.DirEntry, error) {
	i, err := m.walk("open", name, true)
	if err != nil {
		return nil, err
	}
	return m.listDirectory(i, name)
}

func (m memory) listDirectory(i *inode, name string) ([]fs.DirEntry, error) {
	switch i.kind {
	case directory:
	case unreadable:
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: errorOf(i.reason)}
	default:
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: syscall.ENOTDIR}
	}
	entries := make([]fs.DirEntry, len(i.names))
	for j, child := range i.names {
		entries[j] = fs.FileInfoToDirEntry(info{m[path.Join(i.path, child)], child})
	}
	return entries, nil
}

// info is the FileInfo of an inode, with the last element of the path in the call as its name.
type info struct {
	*inode

	name string
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return int64(len(i.data)) }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) IsDir() bool        { return i.Mode().IsDir() }
func (i info) Sys() any           { return nodeStat(i.entry) }

func (i info) Mode() fs.FileMode {
	switch i.kind {
	case directory, unreadable:
		return fs.ModeDir | 0o555
	case link:
		return fs.ModeSymlink | 0o777
	case node:
		if i.block {
			return fs.ModeDevice | 0o600
		}
		return fs.ModeDevice | fs.ModeCharDevice | 0o600
	}
	return 0o444
}

// memoryFile is an open file or directory.
type memoryFile struct {
	*inode

	host   memory
	name   string
	data   *bytes.Reader
	listed int // the number of directory entries returned
}

func (f *memoryFile) Stat() (fs.FileInfo, error) { return info{f.inode, path.Base(f.name)}, nil }
func (f *memoryFile) Close() error               { return nil }

func (f *memoryFile) Read(p []byte) (int, error) {
	switch f.kind {
	case unreadable:
		return 0, &fs.PathError{Op: "read", Path: f.name, Err: errorOf(f.reason)}
	case directory:
		return 0, &fs.PathError{Op: "read", Path: f.name, Err: syscall.EISDIR}
	}
	return f.data.Read(p)
}

// ReadDir implements [fs.ReadDirFile].
func (f *memoryFile) ReadDir(n int) ([]fs.DirEntry, error) {
	entries, err := f.host.listDirectory(f.inode, f.name)
	if err != nil {
		return nil, err
	}
	entries = entries[f.listed:]
	if n > 0 {
		if len(entries) == 0 {
			return nil, io.EOF
		}
		entries = entries[:min(n, len(entries))]
	}
	f.listed += len(entries)
	return entries, nil
}

// kernelErrors are the errors of the kernel that a recorded host returns like the machine.
var kernelErrors = []syscall.Errno{
	syscall.EACCES, syscall.EAGAIN, syscall.EBUSY, syscall.EINVAL, syscall.EIO, syscall.ENODATA, syscall.ENODEV, syscall.ENXIO, syscall.EPERM, syscall.ETIMEDOUT,
}

// errorOf returns the error with which a read failed on the machine.
func errorOf(reason string) error {
	for _, errno := range kernelErrors {
		if errno.Error() == reason {
			return errno
		}
	}
	return errors.New(reason)
}
