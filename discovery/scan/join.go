package scan

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
)

// Findings are the result of a scan: the devices of all families before devices of several families
// are joined. The next scan needs them. The devices belong to looks and must not be modified.
type Findings struct {
	devices  []*discovery.Device // in name order
	problems []discovery.Problem
}

// findingsOf returns the findings of looks, with one device for each name and without repeated
// problems.
func findingsOf(looks []familyScan) *Findings {
	all := new(Findings)
	for _, l := range looks {
		for i := range l.Devices {
			all.devices = append(all.devices, &l.Devices[i])
		}
		all.problems = append(all.problems, l.Problems...)
	}
	all.sort()
	all.dropNamesakes()
	all.dropRepeated()
	return all
}

// RescanHost scans a host like [ReadHost], and keeps the parts of the last findings that are still
// true. last is nil before the first scan.
//
// A device whose directory is missing in sysfs is gone. A device whose directory exists keeps its
// last description if a Problem reports a failed read. Its health is then Unknown, with the problem
// as the reason. A missing device also keeps its last description if the read of its physical
// device, of its family or of a list of devices failed. Parts that are kept replace the whole that
// would otherwise be described in their place. A PCI function that is [pci.IsIdleDriver] and no
// longer described keeps its last description too. Its health then reports a missing driver, or a
// driver that allows no use. A function whose link cannot be read without waking the function keeps
// the last known link attributes.
func RescanHost(host *discovery.Host, families []*discovery.Family, last *Findings) *Findings {
	return mergeFindings(host, last, scanAll(host, families))
}

// sort sorts the devices by name, and keeps the order of devices with equal names.
func (f *Findings) sort() {
	slices.SortStableFunc(f.devices, func(a, b *discovery.Device) int { return strings.Compare(a.Name, b.Name) })
}

// Snapshot returns a snapshot with the work across families done: the devices of one IOMMU group
// become one unit, a whole device takes everything that its parts take, and no two devices share an
// identity or a device plugin ID. Snapshot reads no files.
func (f *Findings) Snapshot() *discovery.Snapshot {
	s := &discovery.Snapshot{Devices: make([]discovery.Device, len(f.devices)), Problems: slices.Clone(f.problems)}
	for i, d := range f.devices {
		s.Devices[i] = *d
	}
	markUnread(s)
	markReadings(s)
	pci.JoinPassthrough(s.Devices)
	discovery.JoinVFIOGroups(s.Devices)
	dropAmbiguous(s)
	joinWholes(s)
	return s
}

// dropNamesakes keeps one of several devices with the same name: the device of the family listed
// first. An existing device replaces a device that could be created on demand, because the device
// was created during the scan.
func (f *Findings) dropNamesakes() {
	kept := f.devices[:0]
	for _, d := range f.devices {
		if len(kept) == 0 || kept[len(kept)-1].Name != d.Name {
			kept = append(kept, d)
			continue
		}
		before := &kept[len(kept)-1]
		switch {
		case ((*before).Creation == nil) == (d.Creation == nil):
			f.problems = append(f.problems, discovery.Problem{Device: d.Family + " " + d.Name, Err: fmt.Errorf("the name is %w, so the description by family %s is used", discovery.ErrNotUnique, (*before).Family)})
		case d.Creation == nil:
			*before = d
		}
	}
	f.devices = kept
}

// dropRepeated removes problems with equal texts. Several families can read a device before the
// device's family is known.
func (f *Findings) dropRepeated() {
	seen := make(map[string]bool)
	f.problems = slices.DeleteFunc(f.problems, func(p discovery.Problem) bool {
		repeated := seen[p.Error()]
		seen[p.Error()] = true
		return repeated
	})
}

// markUnread sets the health of devices with a problem to Unknown.
func markUnread(s *discovery.Snapshot) {
	for _, problem := range s.Problems {
		for i := range s.Devices {
			if d := &s.Devices[i]; d.Name == problem.Device && problem.IsUnread() && d.Health.Status == discovery.Healthy {
				d.Health = discovery.Health{Status: discovery.Unknown, Reason: problem.Text()}
			}
		}
	}
}

// markReadings sets the health of a device whose family found no fault to the worst of its other
// readings.
func markReadings(s *discovery.Snapshot) {
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Health.Status == discovery.Healthy && len(d.Readings) > 0 {
			d.Health = d.Readings[0]
		}
	}
}

// joinWholes makes a device take all of the physical device with the same name if other devices are
// parts of that physical device. The whole is then allocated only without the parts. The whole can
// be a device of another family, for example the parent of mediated devices, or a physical
// function. Parts that take no counters then take one unit of the counter "parts" each, so that the
// parts stay independent of each other.
func joinWholes(s *discovery.Snapshot) {
	parts := make(map[string][]*discovery.Device) // by their silicon
	for i := range s.Devices {
		if d := &s.Devices[i]; d.PartOf != nil {
			parts[d.PartOf.Name] = append(parts[d.PartOf.Name], d)
		}
	}
	for i := range s.Devices {
		if d := &s.Devices[i]; d.PartOf == nil && len(parts[d.Name]) > 0 {
			takeAll(d, parts[d.Name])
		}
	}
}

// takeAll makes the device the whole of the parts' physical device.
func takeAll(d *discovery.Device, parts []*discovery.Device) {
	one := map[string]resource.Quantity{"parts": resource.MustParse("1")}
	all, free := make(map[string]resource.Quantity), int64(0)
	for _, part := range parts {
		maps.Copy(all, part.PartOf.Counters)
		if len(part.Takes) == 0 {
			part.Takes = one
			free++
		}
	}
	if free > 0 {
		all["parts"] = *resource.NewQuantity(free, resource.DecimalSI)
	}
	whole := &discovery.Silicon{Name: d.Name, Counters: all}
	d.PartOf, d.Takes = whole, all
	for _, part := range parts {
		part.PartOf = whole
	}
}
