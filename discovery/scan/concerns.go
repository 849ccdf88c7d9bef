package scan

import (
	"maps"
	"path"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// This file decides which families an event may concern. A kernel event reports that a device was
// added, removed, bound, unbound, changed or renamed. Before the kernel sends the event, the kernel
// has created or removed the device's directory with everything below, the links to the directory
// from the device's class and bus, and the device node (device_add and device_del in
// drivers/base/core.c, Linux 6.12). For a function behind an IOMMU, the kernel has also updated the
// IOMMU group. Other files that change as a consequence are attributes without events;
// [scanner.compare] reads these at the interval.

// grouped are the buses of devices that have IOMMU groups, and the classes of IOMMUs and of
// groups (iommu_buses in drivers/iommu/iommu.c; vfio_noiommu_group_alloc and
// vfio_register_emulated_iommu_dev in drivers/vfio). A group has no events of its own.
var grouped = []string{"amba", "ap", "cdx", "css", "fsl-mc", "host1x", "iommu", "mdev", "pci", "platform", "vfio"}

// iommuGroups is where sysfs lists the members of groups.
const iommuGroups = "sys/kernel/iommu_groups"

// placeOf returns the place in sysfs under which a family scan records its dependency on a file:
// the directory of the file's PCI function, or else the file itself. placeOf returns "" for a file
// outside sysfs.
func placeOf(name string) string {
	if !strings.HasPrefix(name, "sys/") {
		return ""
	}
	if strings.HasPrefix(name, iommuGroups) {
		return iommuGroups
	}
	if function, ok := sysfs.At(nil, name).PCIFunction(); ok {
		return function.Path
	}
	return name
}

// placesOf returns the places of kernel devices and of the files that were read through traces.
func placesOf(matched []sysfs.Device, traces ...*trace) []string {
	places := make(map[string]bool)
	for _, t := range traces {
		maps.Copy(places, t.places)
	}
	for _, d := range matched {
		places[placeOf(d.Path)] = true
	}
	return slices.Sorted(maps.Keys(places))
}

// changedPlace is a place that an event may have changed, together with everything below the place
// and with the directory listings above the place, up to top.
type changedPlace struct{ name, top string }

// changedPlaces returns the places that the event may have changed.
func (e Uevent) changedPlaces() (places []changedPlace) {
	for _, dir := range []string{e.Path, e.OldPath} {
		if dir == "" {
			continue
		}
		name := path.Base(dir)
		places = append(places,
			changedPlace{path.Join("sys/class", e.Subsystem, name), "sys/class"},
			changedPlace{path.Join("sys/bus", e.Subsystem, "devices", name), "sys/bus"},
		)
		if e.Subsystem == "pci" {
			// A physical function and its virtual ones, which have links to each other,
			// are below the same port, or on the same root bus.
			dir = path.Dir(dir)
		}
		places = append(places, changedPlace{dir, "."})
	}
	if slices.Contains(grouped, e.Subsystem) {
		places = append(places, changedPlace{iommuGroups, "."})
	}
	if e.Node != "" {
		places = append(places, changedPlace{"sys/dev", "."}) // the links by device numbers
	}
	return append(places, changedPlace{path.Join("sys/bus", e.Subsystem, "drivers"), "sys/bus"}) // the links from drivers to their devices
}

// seesDeviceOf reports whether the scan may depend on the device of an event: the scan has read the
// device, a device above or below the device, or the device node.
func (l familyScan) seesDeviceOf(e Uevent) bool {
	for _, changed := range e.changedPlaces() {
		if touchesPlace(l.places, changed, func(place string) string { return place }) {
			return true
		}
	}
	return e.Node != "" && touchesPlace(l.steps, changedPlace{e.Node, "."}, func(step traced) string { return step.name })
}

// touchesPlace reports whether one of the sorted names is in the changed place.
func touchesPlace[T any](all []T, changed changedPlace, nameOf func(T) string) bool {
	at := func(name string) (int, bool) {
		return slices.BinarySearchFunc(all, name, func(one T, name string) int { return strings.Compare(nameOf(one), name) })
	}
	for above := changed.name; above != changed.top && above != "."; above = path.Dir(above) {
		if _, found := at(above); found {
			return true
		}
	}
	below, _ := at(changed.name + "/")
	return below < len(all) && strings.HasPrefix(nameOf(all[below]), changed.name+"/")
}

// concernsFamilies reports whether changes may affect devices that families match, or files that
// families have read. Other changes leave the last snapshot valid.
func (s *scanner) concernsFamilies(c Changes) bool {
	return c.Everything || slices.ContainsFunc(c.Uevents, func(e Uevent) bool {
		return slices.ContainsFunc(s.families, func(f *discovery.Family) bool { return mayMatch(f, e) }) ||
			slices.ContainsFunc(s.looks, func(l familyScan) bool { return l.seesDeviceOf(e) })
	})
}

// mayMatch reports whether the family may match the device of an event.
func mayMatch(f *discovery.Family, e Uevent) bool {
	hardware := !isVirtual(e.Path) || e.OldPath != "" && !isVirtual(e.OldPath)
	return slices.ContainsFunc(f.Match, func(m discovery.Match) bool {
		return (m.Bus == e.Subsystem || m.Class == e.Subsystem) && (hardware || !m.Hardware)
	})
}

// isVirtual reports whether a device has no parent device (get_device_parent in
// drivers/base/core.c).
func isVirtual(name string) bool { return strings.HasPrefix(name, "sys/devices/virtual/") }
