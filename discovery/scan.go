package discovery

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery/sysfs"
)

// Scan returns the devices of the given families on a host. It never fails:
// what could not be described is left out of the snapshot, or is in it with
// health Unknown and without what could not be read, and is named in Problems.
func Scan(host *Host, families []*Family) *Snapshot {
	kernel := newKernel(host.FS)
	s := &Snapshot{}
	claimed := make(map[string]bool) // paths that families matched
	for _, f := range leftoversLast(families) {
		found, problems := f.matched(kernel)
		switch {
		case f.Unclaimed:
			found = s.left(slices.DeleteFunc(found, func(d sysfs.Device) bool { return claimed[d.Path] }))
		case f.Leftovers:
			found = s.left(found)
		default:
			for _, d := range found {
				claimed[d.Path] = true
			}
		}
		s.Problems = append(s.Problems, problems...)
		if len(found) == 0 && !f.Configured {
			continue
		}
		devices, problems := f.describe(host, found)
		s.Problems = append(s.Problems, problems...)
		s.add(devices, f)
	}
	s.Problems = append(kernel.problems, s.Problems...)
	s.sort()
	s.dropNamesakes()
	s.dropRepeated()
	s.markUnread()
	s.readPCI(host)
	s.setPlaces(host)
	s.joinGroups()
	s.dropAmbiguous()
	s.joinWholes()
	return s
}

// sort puts the devices in name order, those of one name in the order in which
// they were found. A device is large, so each is moved once.
func (s *Snapshot) sort() {
	order := make([]int, len(s.Devices))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(strings.Compare(s.Devices[a].Name, s.Devices[b].Name), cmp.Compare(a, b))
	})
	sorted := make([]Device, len(order))
	for i, at := range order {
		sorted[i] = s.Devices[at]
	}
	s.Devices = sorted
}

// joinWholes makes a device take all of the silicon that bears its name and
// that others are parts of, so that it is given out only without them: the
// device that mediated devices are made of is another family's, and so may a
// physical function be. Parts that take nothing of their silicon take one part
// of it each then, which leaves them free of one another.
func (s *Snapshot) joinWholes() {
	parts := make(map[string][]*Device) // by their Whole
	for i := range s.Devices {
		if d := &s.Devices[i]; d.PartOf != nil {
			parts[d.PartOf.Name] = append(parts[d.PartOf.Name], d)
		}
	}
	for i := range s.Devices {
		if d := &s.Devices[i]; d.PartOf == nil && len(parts[d.Name]) > 0 {
			d.takeAll(parts[d.Name])
		}
	}
}

// takeAll makes the device the Whole of its parts.
func (d *Device) takeAll(parts []*Device) {
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
	whole := &Whole{Name: d.Name, Counters: all}
	d.PartOf, d.Takes = whole, all
	for _, part := range parts {
		part.PartOf = whole
	}
}

// leftoversLast returns the families in the order in which they are asked.
func leftoversLast(families []*Family) []*Family {
	ordered := slices.Clone(families)
	slices.SortStableFunc(ordered, func(a, b *Family) int {
		switch {
		case a.Leftovers == b.Leftovers:
			return 0
		case a.Leftovers:
			return 1
		}
		return -1
	})
	return ordered
}

// left returns the kernel devices that no device of the snapshot consists of.
// One that somebody could not read may be somebody's, and is not left either.
func (s *Snapshot) left(found []sysfs.Device) []sysfs.Device {
	taken := make(map[string]bool) // paths, and names of devices
	for i := range s.Devices {
		d := &s.Devices[i]
		taken[d.Source] = true
		for _, path := range d.Includes {
			taken[path] = true
		}
	}
	for _, problem := range s.Problems {
		taken[problem.Device] = true
	}
	return slices.DeleteFunc(found, func(d sysfs.Device) bool { return taken[d.Path] || taken[DeviceName(d)] })
}

// describe calls the family's Describe. A family that panics on what it finds
// is a defect of ours, but must not take the devices of the others with it.
func (f *Family) describe(host *Host, found []sysfs.Device) (devices []Device, problems []Problem) {
	defer func() {
		if cause := recover(); cause != nil {
			devices, problems = nil, []Problem{{f.Name, fmt.Errorf("describe: panic: %v", cause)}}
		}
	}()
	return f.Describe(host, found)
}

// add takes the family's devices into the snapshot, less those that could not
// be published or handed out.
func (s *Snapshot) add(devices []Device, f *Family) {
	s.Devices = slices.Grow(s.Devices, len(devices))
	for i := range devices {
		d := &devices[i]
		d.Family, d.Configured = f.Name, f.Configured
		if d.Attributes == nil {
			d.Attributes = Attributes{}
		}
		d.Attributes.SetString("family", f.Name)
		if d.Health.Status == "" {
			d.Health.Status = Healthy
		}
		if err := errors.Join(d.Validate(), d.checkFiles(f.FileDirs)); err != nil {
			s.Problems = append(s.Problems, Problem{d.Name, err})
			continue
		}
		s.Devices = append(s.Devices, *d)
	}
}

// dropNamesakes keeps the first of several devices of one name, that of the
// family listed first.
func (s *Snapshot) dropNamesakes() {
	kept := 0
	for i := range s.Devices {
		if d := &s.Devices[i]; kept > 0 && s.Devices[kept-1].Name == d.Name {
			s.Problems = append(s.Problems, Problem{d.Family + " " + d.Name, fmt.Errorf("described by family %s too, whose description is kept", s.Devices[kept-1].Family)})
			continue
		}
		if kept != i {
			s.Devices[kept] = s.Devices[i]
		}
		kept++
	}
	s.Devices = s.Devices[:kept]
}

// dropRepeated keeps one of several problems that say the same: more than one
// family looks at a device before it is known whose it is.
func (s *Snapshot) dropRepeated() {
	seen := make(map[string]bool)
	s.Problems = slices.DeleteFunc(s.Problems, func(p Problem) bool {
		repeated := seen[p.Error()]
		seen[p.Error()] = true
		return repeated
	})
}

// markUnread turns the health of devices that have a problem to Unknown.
func (s *Snapshot) markUnread() {
	for _, problem := range s.Problems {
		for i := range s.Devices {
			if d := &s.Devices[i]; d.Name == problem.Device && d.Health.Status == Healthy {
				d.Health = Health{Status: Unknown, Reason: problem.Err.Error()}
			}
		}
	}
}
