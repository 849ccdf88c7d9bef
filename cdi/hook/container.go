// Package hook changes the file system of a container that is being created: an OCI runtime runs it
// as a createContainer hook, as root, with the container's state on its standard input
// (runtime-spec, config.md "POSIX-platform Hooks").
//
// The container's content comes from its image, and an image may be malicious. Therefore every path
// is resolved as if the container's root were "/", by openat2(2) with RESOLVE_IN_ROOT if the kernel
// supports it. No link leads out of the root, and no program of the container is run. After a
// check, a path is not resolved a second time: this was the cause of CVE-2024-0132 and
// CVE-2025-23359.
package hook

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"github.com/cyphar/filepath-securejoin/pathrs-lite"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// A Hook is an operation on a container.
type Hook struct {
	Name  string // as in "chandler hook create-symlinks"
	Short string // a description in one line

	// Flags maps the names of the flags to help texts. Each flag can be repeated.
	Flags map[string]string

	// Run runs the hook. The values of each flag are in the order of the command line.
	Run func(c *Container, flags map[string][]string) error
}

// Common returns the hooks that are independent of vendors.
func Common() []Hook { return []Hook{updateLDCache, createSymlinks} }

// Container is the file system of a container that is being created. All paths are paths in the
// container.
type Container struct {
	root *os.File
}

// The state and the configuration come from the runtime, so the limit only protects the memory.
const maxState = 64 << 20

// ReadContainer returns the file system of a container, by the state that a runtime passes to its
// hooks.
func ReadContainer(state io.Reader) (*Container, error) {
	var container specs.State
	if err := json.NewDecoder(io.LimitReader(state, maxState)).Decode(&container); err != nil {
		return nil, fmt.Errorf("container's state on standard input: %w", err)
	}
	if container.Bundle == "" {
		return nil, errors.New("container's state on standard input: it names no bundle")
	}
	name := filepath.Join(container.Bundle, "config.json")
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var config specs.Spec
	if err := json.NewDecoder(io.LimitReader(file, maxState)).Decode(&config); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if config.Root == nil || config.Root.Path == "" {
		return nil, fmt.Errorf("%s: it names no root", name)
	}
	root := config.Root.Path
	if !filepath.IsAbs(root) {
		root = filepath.Join(container.Bundle, root)
	}
	if filepath.Clean(root) == "/" {
		return nil, fmt.Errorf("%s: the container's root is the host's", name)
	}
	return In(root)
}

// In returns the file system of a container whose root is a directory.
func In(root string) (*Container, error) {
	dir, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("container's root: %w", err)
	}
	return &Container{root: dir}, nil
}

// Close releases the container's root.
func (c *Container) Close() error { return c.root.Close() }

// Open opens a regular file for reading.
func (c *Container) Open(name string) (*os.File, error) {
	file, err := c.openHandle(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, inContainer(name, err)
	}
	if !info.Mode().IsRegular() { // a pipe would block, and opening a device can have side effects
		return nil, inContainer(name, fmt.Errorf("a %s is in the place of a regular file", info.Mode().Type()))
	}
	opened, err := pathrs.Reopen(file, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC)
	return opened, inContainer(name, err)
}

// Read reads a regular file of at most limit bytes.
func (c *Container) Read(name string, limit int64) ([]byte, error) {
	file, err := c.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("more than %d bytes", limit)
	}
	return data, inContainer(name, err)
}

// ListDir returns the entries of a directory, by name.
func (c *Container) ListDir(dir string) ([]fs.DirEntry, error) {
	handle, err := c.openHandle(dir)
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	opened, err := pathrs.Reopen(handle, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC)
	if err != nil {
		return nil, inContainer(dir, err)
	}
	defer opened.Close()
	return fs.ReadDir(dirFS{opened}, ".")
}

// dirFS is an open directory, for fs.ReadDir.
type dirFS struct{ dir *os.File }

func (d dirFS) Open(string) (fs.File, error) { return d.dir, nil }

// FileExists reports whether a file exists, after resolving links in the container.
func (c *Container) FileExists(name string) bool {
	file, err := c.openHandle(name)
	if err != nil {
		return false
	}
	file.Close()
	return true
}

// Write creates a world-readable file, with its parent directories. It replaces an existing file
// atomically, and replaces a link instead of following it.
func (c *Container) Write(name string, data []byte) error {
	return c.replace(name, func(dir int, temporary string) error {
		fd, err := unix.Openat(dir, temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
		if err != nil {
			return err
		}
		file := os.NewFile(uintptr(fd), temporary)
		defer file.Close()
		if err := file.Chmod(0o644); err != nil { // the runtime's umask may be restrictive
			return err
		}
		_, err = file.Write(data)
		return errors.Join(err, file.Close())
	})
}

// Link creates a symbolic link, with its parent directories, and replaces an existing file or link.
// The target can be any text, because it is resolved only in the container.
func (c *Container) Link(target, name string) error {
	return c.replace(name, func(dir int, temporary string) error { return unix.Symlinkat(target, dir, temporary) })
}

// replace creates a file under a temporary name, and renames it.
func (c *Container) replace(name string, create func(dir int, temporary string) error) error {
	name = path.Clean("/" + name)
	parent, err := pathrs.MkdirAllHandle(c.root, path.Dir(name), 0o755)
	if err != nil {
		return inContainer(path.Dir(name), err)
	}
	defer parent.Close()
	dir, base := int(parent.Fd()), path.Base(name)
	temporary := ".chandler-" + rand.Text()
	if err = create(dir, temporary); err == nil {
		err = unix.Renameat(dir, temporary, dir, base)
	}
	if err != nil {
		_ = unix.Unlinkat(dir, temporary, 0)
	}
	return inContainer(name, err)
}

// CoverFile mounts a file with other content over one of the container, read only. The content is
// in memory, so the container needs no writable directory. The covered file is the one that was
// resolved first, even if its name changes meanwhile.
func (c *Container) CoverFile(name string, data []byte) error {
	target, err := c.openHandle(name)
	if err != nil {
		return err
	}
	defer target.Close()
	if err := c.coverAt(target, path.Dir(path.Clean("/"+name)), data); err != nil {
		return inContainer(name, fmt.Errorf("lay a file over it: %w", err))
	}
	mounted, err := c.openHandle(name) // the first descriptor refers to the file below the mount
	if err != nil {
		return err
	}
	defer mounted.Close()
	flags := uintptr(unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)
	if err := unix.Mount("", descriptorPath(mounted), "", flags, ""); err != nil {
		return inContainer(name, fmt.Errorf("make the file over it read-only: %w", err))
	}
	return nil
}

// coverAt mounts a file of a new tmpfs over a file. A bind mount needs a mounted source, so the
// tmpfs temporarily covers a directory of the container.
func (c *Container) coverAt(target *os.File, dir string, data []byte) (err error) {
	below, err := c.openHandle(dir)
	if err != nil {
		return err
	}
	defer below.Close()
	size := fmt.Sprintf("mode=0755,size=%d", len(data)+1<<20)
	if err := unix.Mount("tmpfs", descriptorPath(below), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, size); err != nil {
		return err
	}
	scratch, err := c.openHandle(dir)
	if err != nil {
		return errors.Join(err, unix.Unmount(descriptorPath(below), unix.MNT_DETACH))
	}
	defer scratch.Close()
	defer func() { err = errors.Join(err, unix.Unmount(descriptorPath(scratch), unix.MNT_DETACH)) }()
	fd, err := unix.Openat(int(scratch.Fd()), "cover", unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), "cover")
	defer file.Close()
	if err := file.Chmod(0o444); err != nil { // the runtime's umask may be restrictive
		return err
	}
	if _, err := file.Write(data); err != nil {
		return err
	}
	return unix.Mount(descriptorPath(file), descriptorPath(target), "", unix.MS_BIND, "")
}

// FileSystem returns the type of a file's file system, as in statfs(2).
func (c *Container) FileSystem(name string) (int64, error) {
	file, err := c.openHandle(name)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	var stat unix.Statfs_t
	err = unix.Fstatfs(int(file.Fd()), &stat)
	return int64(stat.Type), inContainer(name, err) //nolint:unconvert // an int32 on some machines
}

// DeviceNumbers returns the numbers of a character device, and whether there is one. It does not
// follow a link at the end of the path.
func (c *Container) DeviceNumbers(name string) (major, minor uint32, ok bool) {
	parent, err := c.openHandle(path.Dir(name))
	if err != nil {
		return 0, 0, false
	}
	defer parent.Close()
	var stat unix.Stat_t
	err = unix.Fstatat(int(parent.Fd()), path.Base(name), &stat, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil || stat.Mode&unix.S_IFMT != unix.S_IFCHR {
		return 0, 0, false
	}
	return unix.Major(stat.Rdev), unix.Minor(stat.Rdev), true
}

// openHandle returns a handle of a file, which is resolved in the container but not opened.
func (c *Container) openHandle(name string) (*os.File, error) {
	file, err := pathrs.OpenatInRoot(c.root, path.Clean("/"+name))
	return file, inContainer(name, err)
}

// descriptorPath returns a path that leads to an open file without resolving the file's name.
func descriptorPath(file *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", file.Fd()) }

func inContainer(name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s in the container: %w", name, err)
}
