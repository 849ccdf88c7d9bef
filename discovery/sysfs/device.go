// Package sysfs reads kernel devices from sysfs. It knows how sysfs is laid
// out and nothing about accelerators or Kubernetes.
//
// All functions read through an [io/fs.FS] that is rooted at the host's "/".
// So a machine, a recorded host and a container's mount are read alike. See
// Documentation/admin-guide/sysfs-rules.rst and Documentation/ABI/ in the
// kernel's source.
package sysfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// maxAttribute bounds what is read of one attribute, in bytes. The kernel
// never shows more than a page (fs/sysfs/file.c), so more is no attribute.
const maxAttribute = 4096

// Device is one kernel device: a directory below /sys/devices.
type Device struct {
	// Path is the directory as a path of the host's file system, without the
	// leading slash: "sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0". Where
	// sysfs was copied without its links, it is where the device was found.
	Path string

	fsys fs.FS
	seen *seen // nil if nothing is remembered
}

// seen is what was read of a listed device. Many callers ask for it. Reading it
// once is quicker, and gives all of them the same answer.
type seen struct {
	driver      string
	knowsDriver bool
	id          PCIID
	idErr       error
	knowsID     bool
}

// At returns the device whose directory is path, which is not checked to
// exist.
func At(fsys fs.FS, path string) Device { return Device{Path: path, fsys: fsys} }

// In returns the device as it is in another view of the same host. It has what
// was remembered of it until now, and remembers the rest by itself.
func (d Device) In(fsys fs.FS) Device {
	d.fsys = fsys
	if d.seen != nil {
		remembered := *d.seen
		d.seen = &remembered
	}
	return d
}

// Bus returns the devices of a bus, in name order: /sys/bus/pci/devices/*.
// If the kernel has no such bus, the error wraps fs.ErrNotExist.
//
// A device remembers its driver and PCIID once somebody asked for them. Use the
// devices for one scan, and in one goroutine.
func Bus(fsys fs.FS, bus string) ([]Device, error) {
	return list(fsys, path.Join("sys/bus", bus, "devices"))
}

// Class returns the devices of a class, in name order: /sys/class/drm/*. If the
// kernel has no such class, the error wraps fs.ErrNotExist.
func Class(fsys fs.FS, class string) ([]Device, error) {
	return list(fsys, path.Join("sys/class", class))
}

// list returns a device for each entry of dir that is a directory or a link.
func list(fsys fs.FS, dir string) ([]Device, error) {
	entries, err := fs.ReadDir(fsys, dir)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	devices := make([]Device, 0, len(entries))
	for _, entry := range entries {
		name := path.Join(dir, entry.Name())
		switch {
		case entry.Type()&fs.ModeSymlink != 0:
			devices = append(devices, Device{Path: resolve(fsys, name), fsys: fsys, seen: &seen{}})
		case entry.IsDir():
			devices = append(devices, Device{Path: name, fsys: fsys, seen: &seen{}})
		}
	}
	return devices, nil
}

// resolve follows an entry of a bus or a class, which is one link. If the link
// cannot be read, or leads out of /sys, resolve returns the entry itself.
func resolve(fsys fs.FS, name string) string {
	target, err := fs.ReadLink(fsys, name)
	if err != nil {
		return name
	}
	if path.IsAbs(target) {
		target = strings.TrimPrefix(path.Clean(target), "/") // of the host, wherever it is mounted
	} else {
		target = path.Join(path.Dir(name), target)
	}
	if !strings.HasPrefix(target, "sys/") {
		return name
	}
	return target
}

// Name returns the kernel's name of the device, such as "0000:03:00.0".
func (d Device) Name() string { return path.Base(d.Path) }

// Parent returns the device's parent directory as a device.
func (d Device) Parent() Device { return Device{Path: path.Dir(d.Path), fsys: d.fsys} }

// Child returns the directory name below the device as a device, which is not
// checked to exist.
func (d Device) Child(name string) Device {
	return Device{Path: path.Join(d.Path, name), fsys: d.fsys}
}

// Exists reports whether the device has an entry of that name, without
// following it if it is a link.
func (d Device) Exists(name string) bool {
	found, _ := d.Has(name)
	return found
}

// Has reports what Exists does, and the error if the entry cannot be looked at.
func (d Device) Has(name string) (bool, error) {
	_, err := fs.Lstat(d.fsys, path.Join(d.Path, name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Children returns the directories below the device's sub-directory dir, in
// name order: Children("drm") of a PCI function are card0 and renderD128. If dir
// is missing, there are none.
func (d Device) Children(dir string) []Device {
	entries, err := fs.ReadDir(d.fsys, path.Join(d.Path, dir))
	if err != nil {
		return nil
	}
	var children []Device
	for _, entry := range entries {
		if entry.IsDir() {
			children = append(children, d.Child(path.Join(dir, entry.Name())))
		}
	}
	return children
}

// Numbered returns the Children of dir whose names are the prefix and a number of
// up to 16 bits, in name order: Numbered("drm", "card") returns card0.
func (d Device) Numbered(dir, prefix string) []Device {
	return slices.DeleteFunc(d.Children(dir), func(child Device) bool {
		digits, ok := strings.CutPrefix(child.Name(), prefix)
		_, err := strconv.ParseUint(digits, 10, 16)
		return !ok || err != nil
	})
}

// Link returns the last element of a link's target, such as "amdgpu" for
// "driver" and "42" for "iommu_group", or "" if there is no such link. Link does
// not follow the link, which may lead nowhere in a copied tree.
func (d Device) Link(name string) string {
	target, err := fs.ReadLink(d.fsys, path.Join(d.Path, name))
	if err != nil {
		return ""
	}
	return path.Base(target)
}

// LinkTo returns the device that a link below this one leads to, such as the
// physical function behind "physfn".
func (d Device) LinkTo(name string) (Device, bool) {
	if d.Link(name) == "" {
		return Device{}, false
	}
	target := resolve(d.fsys, path.Join(d.Path, name))
	return Device{Path: target, fsys: d.fsys}, true
}

// Driver returns the name of the kernel driver that is bound to the device,
// or "" if none is.
//
// A tree that was copied without links has no link to the subsystem either. There
// Driver reads the uevent file. It does not read that file of a running kernel,
// whose readers wait until a driver that probes the device is done (uevent_show
// in drivers/base/core.c).
func (d Device) Driver() string {
	if d.seen == nil {
		return d.readDriver()
	}
	if !d.seen.knowsDriver {
		d.seen.driver, d.seen.knowsDriver = d.readDriver(), true
	}
	return d.seen.driver
}

func (d Device) readDriver() string {
	if name := d.Link("driver"); name != "" || d.Link("subsystem") != "" {
		return name
	}
	return d.Uevent()["DRIVER"]
}

// Bound reports whether a driver is bound to the device. The driver's name may
// be unknown: a tree that was copied without links still has the directories that
// only a driver makes.
func (d Device) Bound() bool {
	return d.Driver() != "" || slices.ContainsFunc([]string{"drm", "accel", "net", "infiniband"}, d.Exists)
}

// Uevent returns the variables of the device's uevent file, or none if the file
// cannot be read.
func (d Device) Uevent() map[string]string {
	text, err := d.Text("uevent")
	if err != nil {
		return nil
	}
	variables := make(map[string]string)
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			variables[key] = value
		}
	}
	return variables
}

// Text returns an attribute without the white space around it and without the
// zero bytes that pad its end. An attribute of more than a page, or one that is
// no text, is an error.
func (d Device) Text(name string) (string, error) {
	return ReadText(d.fsys, path.Join(d.Path, name), maxAttribute)
}

// padding ends what drivers show: a newline, or the spaces or zero bytes that
// fill a field up. Device tree properties end with a zero byte
// (of_node_property_read in drivers/of/kobj.c shows them as they are stored).
const padding = " \t\n\v\f\r\x00"

// ReadText returns a file without the white space around it and without the
// zero bytes that pad its end. A file of more than limit bytes is an error, and
// so is a zero byte before the end of the text.
func ReadText(fsys fs.FS, name string, limit int) (string, error) {
	file, err := fsys.Open(name)
	if err != nil {
		return "", err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, int64(limit)+1))
	if err != nil {
		// os.DirFS names a file by the host's path only where it opens it.
		if cause := (*fs.PathError)(nil); errors.As(err, &cause) {
			err = cause.Err
		}
		return "", &fs.PathError{Op: "read", Path: name, Err: err}
	}
	if len(data) > limit {
		return "", fmt.Errorf("read %s: longer than %d bytes", name, limit)
	}
	text := strings.TrimSpace(strings.TrimRight(string(data), padding))
	if strings.ContainsRune(text, 0) {
		return "", fmt.Errorf("read %s: not a text", name)
	}
	return text, nil
}

// Attrs starts reading several attributes of the device. Ask for the errors once,
// with [Attrs.Err].
func (d Device) Attrs() *Attrs { return &Attrs{device: d} }

// Attrs reads attributes of one device and collects the errors. A missing
// attribute is no error: it is reported as not there.
type Attrs struct {
	device Device
	errs   []error
}

// Text returns an attribute without the white space around it. An empty
// attribute counts as not there.
func (a *Attrs) Text(name string) (string, bool) {
	text, err := a.device.Text(name)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			a.fail(name, err)
		}
		return "", false
	}
	return text, text != ""
}

// Written returns an attribute that the kernel never leaves empty. It is an error
// if the attribute is empty, or a link that leads nowhere.
func (a *Attrs) Written(name string) (string, bool) {
	failed := len(a.errs)
	text, ok := a.Text(name)
	if !ok && len(a.errs) == failed && a.device.Exists(name) {
		a.fail(name, errors.New("empty, or a link that leads nowhere"))
	}
	return text, ok
}

// Uint returns an attribute that is a number, decimal or with a 0x prefix.
func (a *Attrs) Uint(name string) (uint64, bool) { return number(a, name, strconv.ParseUint) }

// Int returns an attribute that is a number with or without a sign, decimal
// or with a 0x prefix.
func (a *Attrs) Int(name string) (int64, bool) { return number(a, name, strconv.ParseInt) }

// Hex returns an attribute that is a hexadecimal number of exactly width digits,
// with or without 0x before them. It returns the digits in lower case: "10de" for
// "0x10DE".
func (a *Attrs) Hex(name string, width int) (string, bool) {
	text, ok := a.Written(name)
	if !ok {
		return "", false
	}
	digits, err := parseHex(strings.TrimPrefix(text, "0x"), width)
	if err != nil {
		a.fail(name, err)
	}
	return digits, err == nil
}

func parseHex(text string, width int) (string, error) {
	digits := strings.ToLower(text)
	if len(digits) != width || strings.Trim(digits, "0123456789abcdef") != "" {
		return "", fmt.Errorf("not %d hexadecimal digits: %.32q", width, text)
	}
	return digits, nil
}

// Err returns what went wrong in reading, nil if nothing did.
func (a *Attrs) Err() error { return errors.Join(a.errs...) }

func (a *Attrs) fail(name string, err error) {
	a.errs = append(a.errs, fmt.Errorf("attribute %s: %w", name, err))
}

// number reads an attribute with one of strconv's parsers.
func number[T int64 | uint64](a *Attrs, name string, parse func(string, int, int) (T, error)) (T, bool) {
	text, ok := a.Written(name)
	if !ok {
		return 0, false
	}
	base := 10
	if strings.HasPrefix(text, "0x") {
		base = 0 // ParseUint takes the prefix itself; a leading 0 alone is no octal number in sysfs
	}
	value, err := parse(text, base, 64)
	if err != nil {
		a.fail(name, fmt.Errorf("not a number: %.32q", text))
		return 0, false
	}
	return value, true
}

// Node is a device node as the kernel names it.
type Node struct {
	Path  string // "/dev/dri/card1"
	Block bool   // a block device; else a character device

	// Major and Minor are the node's numbers. If they are not known, both are 0,
	// which are the numbers of no node.
	Major, Minor int64
}

// Node returns the node that the kernel has for the device. The dev attribute
// gives its numbers, and DEVNAME in uevent its name.
//
// If there is no DEVNAME, as in copied trees, the node is taken to be in dir, such
// as "/dev/dri", under the device's own name with "/" for "!". If both dev and
// DEVNAME are absent, the numbers are 0 and there is no error. If DEVNAME is there
// but dev is missing, empty or unreadable, Node returns the node without numbers,
// and an error.
func (d Device) Node(dir string) (Node, error) {
	node := Node{Block: d.Link("subsystem") == "block"}
	name := d.Uevent()["DEVNAME"]
	if name != "" && fs.ValidPath(name) {
		node.Path = path.Join("/dev", name)
	} else {
		node.Path = path.Join(dir, strings.ReplaceAll(d.Name(), "!", "/"))
	}
	text, err := d.Text("dev")
	if errors.Is(err, fs.ErrNotExist) && name == "" && !d.Exists("dev") {
		return node, nil
	}
	if err == nil {
		node.Major, node.Minor, err = parseDev(text)
	}
	if err != nil {
		return node, fmt.Errorf("attribute dev: %w", err)
	}
	return node, nil
}

// parseDev parses "226:128". The kernel has 12 bits of major and 20 of minor
// number (include/linux/kdev_t.h), and no device is 0:0.
func parseDev(text string) (major, minor int64, err error) {
	majorText, minorText, _ := strings.Cut(text, ":")
	majorNumber, majorErr := strconv.ParseUint(majorText, 10, 12)
	minorNumber, minorErr := strconv.ParseUint(minorText, 10, 20)
	if majorErr != nil || minorErr != nil || majorNumber == 0 && minorNumber == 0 {
		return 0, 0, fmt.Errorf("not the numbers of a device: %.32q", text)
	}
	return int64(majorNumber), int64(minorNumber), nil
}
