package discoverytest

import (
	"bytes"
	"io/fs"
	"maps"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
)

// damages maps names to functions that replace a file, link or node.
var damages = map[string]func(host *Tree, name string) *Tree{
	"half-written": halfWritten,
	"garbage":      withContent([]byte("\xff\xfe: -- 0xZZ\n\n18446744073709551616 -1\n\x1b[")),
	"empty":        withContent(nil),
	"huge":         withContent(bytes.Repeat([]byte("9"), 1<<17)),
	"NUL":          withContent(make([]byte, 64)),
	"removed":      (*Tree).WithoutFile,
	"directory":    (*Tree).WithDirectory,
	"loop":         func(host *Tree, name string) *Tree { return host.WithLink(name, path.Base(name)) },
}

func withContent(data []byte) func(host *Tree, name string) *Tree {
	return func(host *Tree, name string) *Tree { return host.WithFile(name, data) }
}

// halfWritten keeps the first half of a file or of a link's target, as in a read before the write
// is complete. A node is removed.
func halfWritten(host *Tree, name string) *Tree {
	e, err := host.find("lstat", name, false)
	switch {
	case err != nil:
		return host
	case e.mode&fs.ModeSymlink != 0:
		return host.WithLink(name, e.target[:(len(e.target)+1)/2])
	case e.mode.IsRegular():
		return host.WithFile(name, e.data[:len(e.data)/2])
	}
	return host.WithoutFile(name)
}

// checkDamage damages each file, link and node of the host in turn, in every way. It expects that
// no scan panics and that only the file's own devices change. It leaves out files that the scan
// does not read, because their damage cannot affect the scan. A [IsBrief] test damages every fourth
// file, each in a single way that differs from file to file.
func checkDamage(t *testing.T, host *discovery.Host, f *discovery.Family, whole *discovery.Snapshot) {
	t.Helper()
	tree := host.FS.(*Tree)
	looked := tree.FilesRead(func(fsys fs.FS) { compareScans(t, "that is watched", host, fsys, f, whole) })
	before := make(map[string]string)
	for _, d := range whole.Devices {
		before[d.Name] = string(marshal(t, withoutLinks(d)))
	}
	brief := IsBrief()
	damaged := *host
	for i, name := range looked {
		if brief && i%4 != 0 {
			continue
		}
		owners := fileOwners(name, whole.Devices)
		for j, how := range slices.Sorted(maps.Keys(damages)) {
			if brief && (i/4+j)%len(damages) != 0 {
				continue
			}
			damaged.FS = damages[how](tree, name)
			snapshot := scan.ReadHost(&damaged, []*discovery.Family{f})
			for _, p := range snapshot.Problems {
				if strings.Contains(p.Error(), "panic") {
					t.Errorf("%s %s: %v", name, how, p)
				}
			}
			checkHarm(t, name, how, owners, whole, before, snapshot)
		}
	}
}

// IsBrief reports whether a test of many hosts should leave some out: with -short, and with the
// race detector, which makes a scan ten times slower and finds the same races on each host.
func IsBrief() bool {
	info, _ := debug.ReadBuildInfo()
	return testing.Short() || info != nil && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// checkHarm reports devices that changed although the damaged file belongs to other devices. owners
// contains the physical devices that own the file.
func checkHarm(t *testing.T, name, how string, owners map[string]bool, whole *discovery.Snapshot, before map[string]string, after *discovery.Snapshot) {
	t.Helper()
	harmed := make(map[string]bool) // physical devices
	for i := range whole.Devices {
		d := &whole.Devices[i]
		if owners[d.Silicon()] || d.Creation != nil && strings.HasPrefix(name, "dev/") {
			continue // a device on demand has no nodes, but depends on nodes
		}
		now, found := after.Lookup(d.Name)
		if found && sameDevice(&now, d) {
			continue // the usual case, and a fast comparison
		}
		if !found || string(marshal(t, withoutLinks(now))) != before[d.Name] {
			harmed[d.Silicon()] = true
		}
	}
	if len(harmed) == 0 {
		return
	}
	owned := len(owners) > 0
	damaged := maps.Clone(harmed)
	maps.Copy(damaged, owners)
	for i := range whole.Devices {
		if d := &whole.Devices[i]; includesAny(d, damaged, whole.Devices) {
			delete(harmed, d.Silicon()) // a device may change with the devices that it includes
		}
	}
	switch {
	case owned && len(harmed) > 0:
		t.Errorf("%s %s: harms %v, to which it does not belong", name, how, slices.Sorted(maps.Keys(harmed)))
	case !owned && isNumbered(name) && len(harmed) > 1 && !carriesAll(path.Dir(name), harmed, whole.Devices):
		t.Errorf("%s %s: harms %v", name, how, slices.Sorted(maps.Keys(harmed)))
	}
}

// withoutLinks returns the device without its links to other devices, because the links change with
// those devices.
func withoutLinks(d discovery.Device) discovery.Device {
	d.Attributes = maps.Clone(d.Attributes)
	delete(d.Attributes, "linkedTo")
	d.Lists = nil
	return d
}

// carriesAll reports whether all harmed devices are below a directory, as USB devices are below
// their controller.
func carriesAll(dir string, harmed map[string]bool, devices []discovery.Device) bool {
	return !slices.ContainsFunc(devices, func(d discovery.Device) bool {
		return harmed[d.Silicon()] && !slices.ContainsFunc(append([]string{d.Source}, d.Includes...), func(own string) bool {
			return strings.HasPrefix(own, dir+"/")
		})
	})
}

// fileOwners returns the physical devices that own a file. A file belongs to a device if the file
// is below one of the device's directories, below a directory of the same name, or below the
// directory of the device's physical device. Otherwise a device node belongs to the devices that
// use it.
func fileOwners(name string, devices []discovery.Device) map[string]bool {
	owners, using := make(map[string]bool), make(map[string]bool)
	for i := range devices {
		d := &devices[i]
		for _, dir := range append([]string{d.Source}, d.Includes...) {
			if !strings.Contains(dir, "/") {
				continue // all of /sys, the source of a counted unit
			}
			if strings.HasPrefix(name, dir+"/") || slices.Contains(strings.Split(name, "/"), path.Base(dir)) {
				owners[d.Silicon()] = true
			}
		}
		if d.PartOf != nil && slices.ContainsFunc(strings.Split(name, "/"), func(element string) bool {
			return discovery.DeviceName(sysfs.At(nil, element)) == d.PartOf.Name
		}) {
			owners[d.Silicon()] = true
		}
		for _, node := range d.Edits.DeviceNodes {
			if node.HostPath == "/"+name {
				using[d.Silicon()] = true
			}
		}
	}
	if len(owners) > 0 {
		return owners
	}
	return using
}

// includesAny reports whether the device includes another device whose physical device is in the
// set.
func includesAny(d *discovery.Device, silicon map[string]bool, devices []discovery.Device) bool {
	return len(d.Includes) > 0 && slices.ContainsFunc(devices, func(other discovery.Device) bool {
		return other.Name != d.Name && silicon[other.Silicon()] && (other.Source == d.Source || slices.Contains(d.Includes, other.Source))
	})
}

// isNumbered reports whether a kernel file is below a numbered directory, such as hwmon3. Damage in
// such a directory may harm one device at most. The directory proc/1 is an exception, because it
// belongs to the host.
func isNumbered(name string) bool {
	kernel := strings.HasPrefix(name, "sys/") || strings.HasPrefix(name, "proc/")
	name = strings.TrimPrefix(name, "proc/1/")
	return kernel && slices.ContainsFunc(strings.Split(path.Dir(name), "/"), func(element string) bool {
		return strings.TrimRight(element, "0123456789") != element
	})
}
