// Package sysfs reads kernel devices from sysfs. The package depends only on the layout of sysfs,
// not on accelerators or Kubernetes.
//
// All functions read through an [io/fs.FS] that is rooted at the host's "/". So a machine, a
// recorded host and a container's mount are read in the same way. See
// Documentation/admin-guide/sysfs-rules.rst and Documentation/ABI/ in the kernel's source.
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

// maxAttribute limits the size of an attribute, in bytes. The kernel never shows more than a page
// (fs/sysfs/file.c), so a longer file is not an attribute.
const maxAttribute = 4096

// Device is one kernel device: a directory below /sys/devices.
type Device struct {
	// Path is the directory as a path of the host's file system, without the leading slash:
	// "sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0". If sysfs was copied without its links,
	// Path is the directory where the device was found.
	Path string

	fsys fs.FS
	seen *seen // nil without a cache
}

// seen caches values of a listed device, because several callers need them. One read is faster, and
// all callers get the same value.
type seen struct {
	driver      string
	knowsDriver bool
	id          PCIID
	idErr       error
	knowsID     bool
}

// At returns the device with the directory path. At does not check whether the directory exists.
func At(fsys fs.FS, path string) Device { return Device{Path: path, fsys: fsys} }

// In returns the device in another view of the same host. The cache is copied: both devices have
// the values cached so far, and cache further values separately.
func (d Device) In(fsys fs.FS) Device {
	d.fsys = fsys
	if d.seen != nil {
		remembered := *d.seen
		d.seen = &remembered
	}
	return d
}

// BusDevices returns the devices of a bus, in name order: /sys/bus/pci/devices/*. If the kernel has
// no such bus, the error wraps fs.ErrNotExist.
//
// A device caches its driver and PCIID after the first read. Use the devices for one scan, and in
// one goroutine.
func BusDevices(fsys fs.FS, bus string) ([]Device, error) {
	return listDevices(fsys, path.Join("sys/bus", bus, "devices"))
}

// ClassDevices returns the devices of a class, in name order: /sys/class/drm/*. If the kernel has
// no such class, the error wraps fs.ErrNotExist.
func ClassDevices(fsys fs.FS, class string) ([]Device, error) {
	return listDevices(fsys, path.Join("sys/class", class))
}

// listDevices returns a device for each entry of dir that is a directory or a link.
func listDevices(fsys fs.FS, dir string) ([]Device, error) {
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

// resolve follows an entry of a bus or a class, which is one link. If the link is unreadable, or
// leads out of /sys, resolve returns the entry itself.
func resolve(fsys fs.FS, name string) string {
	target, err := fs.ReadLink(fsys, name)
	if err != nil {
		return name
	}
	if path.IsAbs(target) {
		target = strings.TrimPrefix(path.Clean(target), "/") // relative to the host's root, wherever that is mounted
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

// Child returns the directory name below the device as a device. Child does not check whether the
// directory exists.
func (d Device) Child(name string) Device {
	return Device{Path: path.Join(d.Path, name), fsys: d.fsys}
}

// HasEntry reports whether the device has an entry with the given name, without following a link.
func (d Device) HasEntry(name string) bool {
	found, _ := d.Has(name)
	return found
}

// Has reports the same as HasEntry, and returns the error if the entry is inaccessible.
func (d Device) Has(name string) (bool, error) {
	_, err := fs.Lstat(d.fsys, path.Join(d.Path, name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Children returns the directories below the device's sub-directory dir, in name order: for a PCI
// function, Children("drm") returns card0 and renderD128. If dir is missing, Children returns none.
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

// NumberedChildren returns the Children of dir whose names are the prefix and a number of up to 16
// bits, in name order: NumberedChildren("drm", "card") returns card0.
func (d Device) NumberedChildren(dir, prefix string) []Device {
	return slices.DeleteFunc(d.Children(dir), func(child Device) bool {
		digits, ok := strings.CutPrefix(child.Name(), prefix)
		_, err := strconv.ParseUint(digits, 10, 16)
		return !ok || err != nil
	})
}

// Link returns the last element of a link's target, such as "amdgpu" for "driver" and "42" for
// "iommu_group", or "" if there is no such link. Link does not follow the link, which may be
// dangling in a copied tree.
func (d Device) Link(name string) string {
	target, err := fs.ReadLink(d.fsys, path.Join(d.Path, name))
	if err != nil {
		return ""
	}
	return path.Base(target)
}

// LinkTo returns the target of a link below the device as a device, such as the physical function
// for "physfn".
func (d Device) LinkTo(name string) (Device, bool) {
	if d.Link(name) == "" {
		return Device{}, false
	}
	target := resolve(d.fsys, path.Join(d.Path, name))
	return Device{Path: target, fsys: d.fsys}, true
}

// Driver returns the name of the kernel driver that is bound to the device, or "" if there is none.
//
// A tree that was copied without links has no subsystem link either. In such a tree, Driver reads
// the uevent file. Driver never reads that file of a running kernel, because the read blocks while
// a driver probes the device (uevent_show in drivers/base/core.c).
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

// HasDriver reports whether a driver is bound to the device. The driver's name may be unknown: a
// tree that was copied without links still has the directories that only drivers create.
func (d Device) HasDriver() bool {
	return d.Driver() != "" || slices.ContainsFunc([]string{"drm", "accel", "net", "infiniband"}, d.HasEntry)
}

// Uevent returns the variables of the device's uevent file, or none if the file is unreadable.
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

// Text returns an attribute without surrounding white space and without zero bytes at the end. An
// attribute of more than a page, or with binary data, is an error.
func (d Device) Text(name string) (string, error) {
	return ReadText(d.fsys, path.Join(d.Path, name), maxAttribute)
}

// padding contains the characters that drivers write at the end: a newline, or spaces or zero bytes
// that fill a field. Device tree properties end with a zero byte (of_node_property_read in
// drivers/of/kobj.c shows the stored value).
const padding = " \t\n\v\f\r\x00"

// ReadText returns a file without surrounding white space and without zero bytes at the end. A file
// of more than limit bytes is an error, and so is a zero byte before the end of the text.
func ReadText(fsys fs.FS, name string, limit int) (string, error) {
	file, err := fsys.Open(name)
	if err != nil {
		return "", err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, int64(limit)+1))
	if err != nil {
		// os.DirFS puts the machine's path into read errors. Use the path on the host.
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

// Attrs starts reading several attributes of the device. Check the errors once, with [Attrs.Err].
func (d Device) Attrs() *Attrs { return &Attrs{device: d} }

// Attrs reads attributes of one device and collects the errors. A missing attribute is not an
// error: the second result is false.
type Attrs struct {
	device Device
	errs   []error
}

// Text returns an attribute without surrounding white space. An empty attribute counts as missing.
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

// RequiredText returns an attribute that the kernel never leaves empty. An empty attribute or a
// dangling link is an error.
func (a *Attrs) RequiredText(name string) (string, bool) {
	failed := len(a.errs)
	text, ok := a.Text(name)
	if !ok && len(a.errs) == failed && a.device.HasEntry(name) {
		a.fail(name, errors.New("empty, or a link that leads nowhere"))
	}
	return text, ok
}

// Uint returns an attribute that is a number, decimal or with a 0x prefix.
func (a *Attrs) Uint(name string) (uint64, bool) { return parseNumber(a, name, strconv.ParseUint) }

// Int returns an attribute that is a number with or without a sign, decimal or with a 0x prefix.
func (a *Attrs) Int(name string) (int64, bool) { return parseNumber(a, name, strconv.ParseInt) }

// Hex returns an attribute that is a hexadecimal number of exactly width digits, with or without
// the prefix 0x. It returns the digits in lower case: "10de" for "0x10DE".
func (a *Attrs) Hex(name string, width int) (string, bool) {
	text, ok := a.RequiredText(name)
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

// Err returns the errors of all reads, nil if there are none.
func (a *Attrs) Err() error { return errors.Join(a.errs...) }

func (a *Attrs) fail(name string, err error) {
	a.errs = append(a.errs, fmt.Errorf("attribute %s: %w", name, err))
}

// parseNumber reads an attribute with one of strconv's parsers.
func parseNumber[T int64 | uint64](a *Attrs, name string, parse func(string, int, int) (T, error)) (T, bool) {
	text, ok := a.RequiredText(name)
	if !ok {
		return 0, false
	}
	base := 10
	if strings.HasPrefix(text, "0x") {
		base = 0 // ParseUint handles the prefix; a leading 0 alone does not mean octal in sysfs
	}
	value, err := parse(text, base, 64)
	if err != nil {
		a.fail(name, fmt.Errorf("not a number: %.32q", text))
		return 0, false
	}
	return value, true
}

// Node is a device node with its kernel name.
type Node struct {
	Path  string // "/dev/dri/card1"
	Block bool   // a block device; otherwise a character device

	// Major and Minor are the node's numbers. If they are unknown, both are 0, which no node has.
	Major, Minor int64
}

// Node returns the kernel's device node of the device. The dev attribute contains its numbers, and
// DEVNAME in uevent its name.
//
// If there is no DEVNAME, as in copied trees, Node assumes a node in dir, such as "/dev/dri", with
// the device's own name and "/" in place of "!". If both dev and DEVNAME are absent, the numbers
// are 0 and there is no error. If DEVNAME exists but dev is missing, empty or unreadable, Node
// returns the node without numbers, and an error.
func (d Device) Node(dir string) (Node, error) {
	node := Node{Block: d.Link("subsystem") == "block"}
	name := d.Uevent()["DEVNAME"]
	if name != "" && fs.ValidPath(name) {
		node.Path = path.Join("/dev", name)
	} else {
		node.Path = path.Join(dir, strings.ReplaceAll(d.Name(), "!", "/"))
	}
	text, err := d.Text("dev")
	if errors.Is(err, fs.ErrNotExist) && name == "" && !d.HasEntry("dev") {
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

// parseDev parses "226:128". The kernel has 12 bits of major and 20 of minor number
// (include/linux/kdev_t.h), and no device is 0:0.
func parseDev(text string) (major, minor int64, err error) {
	majorText, minorText, _ := strings.Cut(text, ":")
	majorNumber, majorErr := strconv.ParseUint(majorText, 10, 12)
	minorNumber, minorErr := strconv.ParseUint(minorText, 10, 20)
	if majorErr != nil || minorErr != nil || majorNumber == 0 && minorNumber == 0 {
		return 0, 0, fmt.Errorf("not MAJOR:MINOR: %.32q", text)
	}
	return int64(majorNumber), int64(minorNumber), nil
}
