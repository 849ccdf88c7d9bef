package discovery

import (
	"errors"
	"io/fs"
	"slices"

	"chandler.dev/discovery/sysfs"
)

// kernel lists the devices of buses and classes. It reads each list once in a scan, for all
// families. An index of PCI functions limits the comparisons of a match to few of thousands.
type kernel struct {
	fsys         fs.FS
	passthroughs bool // the administrator allows VFIO passthrough
	lists        map[string][]sysfs.Device
	byVendor     map[string][]sysfs.Device // PCI functions; the key "" holds functions with an unreadable vendor; nil until the first use
	byClass      map[string][]sysfs.Device // the same, by the two digits of the base class
	byDriver     map[string][]sysfs.Device // the same, by the bound driver
	problems     []Problem
}

func newKernel(host *Host) *kernel {
	return &kernel{fsys: host.FS, passthroughs: len(host.Passthroughs) > 0, lists: make(map[string][]sysfs.Device)}
}

// listDevices returns the devices of the match's bus or class.
func (k *kernel) listDevices(m Match) []sysfs.Device {
	read, name, dir := sysfs.BusDevices, m.Bus, "/sys/bus/"+m.Bus
	if m.Class != "" {
		read, name, dir = sysfs.ClassDevices, m.Class, "/sys/class/"+m.Class
	}
	devices, known := k.lists[dir]
	if known {
		return devices
	}
	devices, err := read(k.fsys, name)
	k.lists[dir] = devices
	// A class is missing if no driver created it. A missing PCI bus is a problem: the host is mounted
	// at the wrong place, or has no such bus.
	if err != nil && (m.Bus == "pci" || !errors.Is(err, fs.ErrNotExist)) {
		k.problems = append(k.problems, Problem{dir, err})
	}
	return devices
}

// candidateDevices returns the match's possible devices of its bus or class, including devices with
// an unreadable index key.
func (k *kernel) candidateDevices(m Match) []sysfs.Device {
	all := k.listDevices(m)
	switch {
	case m.Bus != "pci":
		return all
	case m.Vendor != "":
		if k.byVendor == nil {
			k.byVendor = index(all, func(d sysfs.Device) string { id, _ := d.PCIID(); return id.Vendor })
		}
		return slices.Concat(k.byVendor[m.Vendor], k.byVendor[""])
	case len(m.PCIClass) >= 2:
		if k.byClass == nil {
			k.byClass = index(all, func(d sysfs.Device) string { id, _ := d.PCIID(); return id.Class[:min(2, len(id.Class))] })
		}
		return slices.Concat(k.byClass[m.PCIClass[:2]], k.byClass[""])
	case m.Driver != "":
		if k.byDriver == nil {
			k.byDriver = index(all, sysfs.Device.Driver)
		}
		return k.byDriver[m.Driver]
	}
	return all
}

func index(devices []sysfs.Device, key func(sysfs.Device) string) map[string][]sysfs.Device {
	indexed := make(map[string][]sysfs.Device)
	for _, d := range devices {
		k := key(d)
		indexed[k] = append(indexed[k], d)
	}
	return indexed
}
