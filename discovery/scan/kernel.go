package scan

import (
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"

	"chandler.dev/discovery"
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
	problems     []discovery.Problem
}

func newKernel(host *discovery.Host) *kernel {
	return &kernel{fsys: host.FS, passthroughs: len(host.Passthroughs) > 0, lists: make(map[string][]sysfs.Device)}
}

// listDevices returns the devices of the match's bus or class.
func (k *kernel) listDevices(m discovery.Match) []sysfs.Device {
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
	// A class is missing if no driver created it. A missing PCI bus is a problem: the host is
	// mounted at the wrong place, or has no such bus.
	if err != nil && (m.Bus == "pci" || !errors.Is(err, fs.ErrNotExist)) {
		k.problems = append(k.problems, discovery.Problem{Device: dir, Err: err})
	}
	return devices
}

// candidateDevices returns the match's possible devices of its bus or class, including devices with
// an unreadable index key.
func (k *kernel) candidateDevices(m discovery.Match) []sysfs.Device {
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

// selectsDevice reports whether a device of the match's bus or class belongs to the
// family.
func selectsDevice(m discovery.Match, d sysfs.Device) (bool, error) {
	if m.Name != "" {
		if ok, _ := path.Match(m.Name, d.Name()); !ok {
			return false, nil
		}
	}
	if m.Hardware && isVirtual(d.Path) {
		return false, nil
	}
	if m.Vendor != "" || m.Device != "" || m.PCIClass != "" {
		id, err := d.PCIID()
		switch {
		case m.Vendor != "" && id.Vendor != m.Vendor:
			return false, unlessKnown(id.Vendor, err)
		case m.Device != "" && id.Device != m.Device:
			return false, unlessKnown(id.Device, err)
		case !strings.HasPrefix(id.Class, m.PCIClass):
			return false, unlessKnown(id.Class, err)
		}
	}
	if m.Driver != "" && d.Driver() != m.Driver || m.Unbound && (d.HasDriver() || d.HasEntry("physfn")) {
		return false, nil
	}
	// A link in a class directory may lead to a device that is gone.
	return m.Vendor != "" || m.Device != "" || m.PCIClass != "" || d.HasEntry("."), nil
}

// unlessKnown returns err if the value is unknown because of err.
func unlessKnown(value string, err error) error {
	if value != "" {
		return nil
	}
	return err
}

// matchedDevices returns the kernel devices that belong to the family, each once, in path order.
// The problems are errors of reads that the decision needed.
func (k *kernel) matchedDevices(f *discovery.Family) ([]sysfs.Device, []discovery.Problem) {
	var found []sysfs.Device
	var problems []discovery.Problem
	seen := make(map[string]bool)
	for _, m := range f.Match {
		if m.Passthrough && !k.passthroughs {
			continue
		}
		for _, d := range k.candidateDevices(m) {
			if seen[d.Path] {
				continue
			}
			ok, err := selectsDevice(m, d)
			if err != nil {
				problems = append(problems, discovery.Problem{Device: discovery.DeviceName(d), Err: err})
			}
			if ok {
				seen[d.Path] = true
				found = append(found, d)
			}
		}
	}
	slices.SortFunc(found, func(a, b sysfs.Device) int { return strings.Compare(a.Path, b.Path) })
	return found, problems
}
