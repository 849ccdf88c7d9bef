package paths

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// reader finds the configured paths and USB devices. It reads each directory once.
type reader struct {
	host    *discovery.Host
	classes []string // of /sys/class, nil until the first use
	usb     []usbDevice
	usbErr  error
	hasUSB  bool
}

// matchPath returns the files of the host that match a configured path, in name order.
func (r *reader) matchPath(p discovery.HostPath) ([]*part, error) {
	pattern := strings.TrimPrefix(p.Path, "/")
	found, err := fs.Glob(r.host.FS, pattern)
	if err == nil && len(found) == 0 {
		err = r.checkReadable(pattern)
	}
	if err != nil {
		return nil, fmt.Errorf("path %s: %w", p.Path, err)
	}
	slices.Sort(found)
	var parts []*part
	for _, name := range found {
		if _, err := fs.Stat(r.host.FS, name); errors.Is(err, fs.ErrNotExist) {
			continue // a dangling link
		}
		parts = append(parts, r.describePart(p, name))
	}
	return parts, nil
}

// checkReadable returns the error of reading the directory before the first wildcard of a pattern,
// because [fs.Glob] ignores unreadable directories.
func (r *reader) checkReadable(pattern string) error {
	dir := path.Dir(pattern)
	for strings.ContainsAny(dir, `*?[\`) {
		dir = path.Dir(dir)
	}
	_, err := fs.ReadDir(r.host.FS, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// describePart describes a file of the host. The name has no leading slash.
func (r *reader) describePart(p discovery.HostPath, name string) *part {
	hostPath := "/" + name
	inside := cmp.Or(p.MountPath, hostPath)
	if strings.HasSuffix(inside, "/") {
		inside = path.Join(inside, path.Base(name))
	}
	out := &part{key: hostPath, id: hostPath, source: name, shared: p.Limit > 1}
	if p.Mount {
		access := "rw"
		if p.ReadOnly {
			access = "ro"
		}
		out.mount = &specs.Mount{HostPath: hostPath, ContainerPath: inside, Options: []string{access, "nosuid", "nodev", "rbind", "rprivate"}}
		return out
	}
	permissions := cmp.Or(p.Permissions, "mrw")
	switch info, err := fs.Stat(r.host.FS, name); {
	case err == nil && info.IsDir():
		out.err = r.addDirectory(out, name, inside, permissions)
		return out
	case err == nil && !isNode(name, info):
		out.err = fmt.Errorf("%s: no device node; a file is mounted, as type Mount", hostPath)
		return out
	}
	out.err = r.addNode(out, name, inside, permissions)
	if len(out.kernel) > 0 {
		out.source = out.kernel[0].Path
	}
	return out
}

// addDirectory adds all nodes below a directory, such as /dev/snd.
func (r *reader) addDirectory(out *part, dir, inside, permissions string) error {
	entries, err := fs.ReadDir(r.host.FS, dir)
	if err != nil {
		return fmt.Errorf("directory /%s: %w", dir, err)
	}
	var errs []error
	for _, entry := range entries {
		name, inside := path.Join(dir, entry.Name()), path.Join(inside, entry.Name())
		switch {
		case entry.IsDir():
			errs = append(errs, r.addDirectory(out, name, inside, permissions))
		case entry.Type()&fs.ModeSymlink == 0: // a symbolic link is a second name of a node
			info, err := entry.Info()
			switch {
			case err != nil && !errors.Is(err, fs.ErrNotExist):
				errs = append(errs, fmt.Errorf("directory /%s: %w", dir, err))
			case err == nil && isNode(name, info):
				errs = append(errs, r.addNode(out, name, inside, permissions))
			}
		}
	}
	return errors.Join(errs...)
}

// isNode reports whether a file is a device node. An empty file in /dev also counts: unprivileged
// layouts of a host use empty files in place of nodes.
func isNode(name string, info fs.FileInfo) bool {
	standIn := info.Mode().IsRegular() && info.Size() == 0 && strings.HasPrefix(name, "dev/")
	return info.Mode()&fs.ModeDevice != 0 || standIn
}

// addNode adds a device node. The node's path is the target of any links, because container
// runtimes do not accept links.
func (r *reader) addNode(out *part, name, inside, permissions string) error {
	name = r.followLinks(name)
	node := &specs.DeviceNode{Path: inside, HostPath: "/" + name, Permissions: permissions}
	out.nodes = append(out.nodes, node)
	device, ok := r.kernelDevice(name)
	if !ok {
		return nil
	}
	out.kernel = append(out.kernel, device)
	known, err := discovery.Node(device, "/dev")
	node.Type, node.Major, node.Minor = known.Type, known.Major, known.Minor
	return err
}

// followLinks follows the links at the end of a path. If the target does not exist, followLinks
// returns the path.
func (r *reader) followLinks(name string) string {
	at := name
	for range 8 {
		to, err := fs.ReadLink(r.host.FS, at)
		if err != nil {
			break
		}
		if path.IsAbs(to) {
			at = strings.TrimPrefix(path.Clean(to), "/")
		} else {
			at = path.Join(path.Dir(at), to)
		}
	}
	if _, err := fs.Stat(r.host.FS, at); err != nil || at == "" {
		return name
	}
	return at
}

// kernelDevice returns the kernel device of a node. Most devices have the name of their node in a
// class, and DEVNAME in their uevent file confirms the node.
func (r *reader) kernelDevice(node string) (sysfs.Device, bool) {
	below, ok := strings.CutPrefix(node, "dev/")
	if !ok {
		return sysfs.Device{}, false
	}
	if r.classes == nil {
		r.classes = []string{}
		entries, _ := fs.ReadDir(r.host.FS, "sys/class") // if unreadable, the kernel devices of nodes are unknown
		for _, entry := range entries {
			r.classes = append(r.classes, path.Join("sys/class", entry.Name()))
		}
	}
	for _, class := range r.classes {
		device, ok := sysfs.At(r.host.FS, class).LinkTo(path.Base(node))
		if ok && device.Uevent()["DEVNAME"] == below {
			return device, true
		}
	}
	return sysfs.Device{}, false
}
