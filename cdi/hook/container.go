// Package hook changes the file system of a container that is being created: an OCI runtime
// calls it as a createContainer hook, as root, with the container's state on its standard input
// (runtime-spec, config.md "POSIX-platform Hooks").
//
// The content of the container is its image's, and an image may be hostile. So every path is
// looked up as if the container's root were "/", by openat2(2) with RESOLVE_IN_ROOT where the
// kernel has it. No link leads out, and nothing of the container is ever run. A path that was
// checked is not looked up a second time, which is how CVE-2024-0132 and CVE-2025-23359 got out.
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

// A Hook is one thing that can be done to a container.
type Hook struct {
	Name  string // as in "chandler hook create-symlinks"
	Short string // what it does, in one line

	// Flags are the names of its flags, each with a line of help. Each may be given several times.
	Flags map[string]string

	// Run does it. The values of each flag are in the order in which they were given.
	Run func(c *Container, flags map[string][]string) error
}

// Common are the hooks that concern no vendor.
func Common() []Hook { return []Hook{updateLDCache, createSymlinks} }

// Container is the file system of a container that is being created. All paths are those in the
// container.
type Container struct {
	root *os.File
}

// The state and the configuration are the runtime's, so they are only kept from filling the memory.
const maxState = 64 << 20

// Of returns the file system of the container whose state a runtime writes to its hooks.
func Of(state io.Reader) (*Container, error) {
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

// Close forgets the container.
func (c *Container) Close() error { return c.root.Close() }

// Open opens a regular file for reading.
func (c *Container) Open(name string) (*os.File, error) {
	file, err := c.reach(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, inContainer(name, err)
	}
	if !info.Mode().IsRegular() { // a pipe would be waited for, and a device may do anything
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

// List returns what is in a directory, by name.
func (c *Container) List(dir string) ([]fs.DirEntry, error) {
	handle, err := c.reach(dir)
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

// dirFS is an open directory, as what fs.ReadDir sorts.
type dirFS struct{ dir *os.File }

func (d dirFS) Open(string) (fs.File, error) { return d.dir, nil }

// Exists reports whether there is such a file, wherever links lead in the container.
func (c *Container) Exists(name string) bool {
	file, err := c.reach(name)
	if err != nil {
		return false
	}
	file.Close()
	return true
}

// Write makes a file that everybody can read, with the directories above it. A file that is
// there is replaced as a whole, and a link is replaced rather than followed.
func (c *Container) Write(name string, data []byte) error {
	return c.replace(name, func(dir int, temporary string) error {
		fd, err := unix.Openat(dir, temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
		if err != nil {
			return err
		}
		file := os.NewFile(uintptr(fd), temporary)
		defer file.Close()
		if err := file.Chmod(0o644); err != nil { // whatever the umask of the runtime is
			return err
		}
		_, err = file.Write(data)
		return errors.Join(err, file.Close())
	})
}

// Link makes a symbolic link, with the directories above it, in the place of a file or link that
// is there. The target may be anything: it counts only in the container.
func (c *Container) Link(target, name string) error {
	return c.replace(name, func(dir int, temporary string) error { return unix.Symlinkat(target, dir, temporary) })
}

// replace has a file made under a temporary name beside the one it is to have.
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

// Cover lays a file with other content over one of the container, read only. The content is in
// memory, so the container may have no directory that can be written. The file to cover stays what
// it was looked up as, whatever happens to its name meanwhile.
func (c *Container) Cover(name string, data []byte) error {
	target, err := c.reach(name)
	if err != nil {
		return err
	}
	defer target.Close()
	if err := c.coverAt(target, path.Dir(path.Clean("/"+name)), data); err != nil {
		return inContainer(name, fmt.Errorf("lay a file over it: %w", err))
	}
	mounted, err := c.reach(name) // the descriptor from before leads below the mount
	if err != nil {
		return err
	}
	defer mounted.Close()
	flags := uintptr(unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)
	if err := unix.Mount("", descriptor(mounted), "", flags, ""); err != nil {
		return inContainer(name, fmt.Errorf("make the file over it read-only: %w", err))
	}
	return nil
}

// coverAt mounts a file of a new tmpfs over a file. A mount can be made only of what has a place
// itself, so the tmpfs lies over a directory of the container for that moment.
func (c *Container) coverAt(target *os.File, dir string, data []byte) (err error) {
	below, err := c.reach(dir)
	if err != nil {
		return err
	}
	defer below.Close()
	size := fmt.Sprintf("mode=0755,size=%d", len(data)+1<<20)
	if err := unix.Mount("tmpfs", descriptor(below), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, size); err != nil {
		return err
	}
	scratch, err := c.reach(dir)
	if err != nil {
		return errors.Join(err, unix.Unmount(descriptor(below), unix.MNT_DETACH))
	}
	defer scratch.Close()
	defer func() { err = errors.Join(err, unix.Unmount(descriptor(scratch), unix.MNT_DETACH)) }()
	fd, err := unix.Openat(int(scratch.Fd()), "cover", unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), "cover")
	defer file.Close()
	if err := file.Chmod(0o444); err != nil { // whatever the umask of the runtime is
		return err
	}
	if _, err := file.Write(data); err != nil {
		return err
	}
	return unix.Mount(descriptor(file), descriptor(target), "", unix.MS_BIND, "")
}

// FileSystem returns the type of the file system that has a file, as statfs(2).
func (c *Container) FileSystem(name string) (int64, error) {
	file, err := c.reach(name)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	var stat unix.Statfs_t
	err = unix.Fstatfs(int(file.Fd()), &stat)
	return int64(stat.Type), inContainer(name, err) //nolint:unconvert // an int32 on some machines
}

// Device returns the numbers of a character device, without following a link that is the last of
// the path. It reports whether there is one.
func (c *Container) Device(name string) (major, minor uint32, ok bool) {
	parent, err := c.reach(path.Dir(name))
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

// reach returns a handle of a file, which is looked up in the container and not opened.
func (c *Container) reach(name string) (*os.File, error) {
	file, err := pathrs.OpenatInRoot(c.root, path.Clean("/"+name))
	return file, inContainer(name, err)
}

// descriptor is a path that leads to what is open, and is not looked up.
func descriptor(file *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", file.Fd()) }

func inContainer(name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s in the container: %w", name, err)
}
