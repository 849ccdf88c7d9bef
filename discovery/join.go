package discovery

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// found is what families found, before the work on devices of several families is done. It
// refers to the devices of looks, which nothing modifies.
type found struct {
	devices  []*Device // in name order
	problems []Problem
}

// joinLooks makes a snapshot of what families found, and does what concerns all of
// them: devices that are used through one IOMMU group become one unit, a whole
// takes all that its parts take, and no two devices are known by one name,
// identity or classic ID. It reads nothing and modifies no look.
func joinLooks(looks []look) *Snapshot { return foundIn(looks).join() }

// foundIn returns what is in looks, with one device of each name and each problem once.
func foundIn(looks []look) found {
	var all found
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

// sort puts devices in name order, those of one name in the order in which they were found.
func (f *found) sort() {
	slices.SortStableFunc(f.devices, func(a, b *Device) int { return strings.Compare(a.Name, b.Name) })
}

// join makes a snapshot of what all families found.
func (f found) join() *Snapshot {
	s := &Snapshot{Devices: make([]Device, len(f.devices)), Problems: slices.Clone(f.problems), found: f}
	for i, d := range f.devices {
		s.Devices[i] = *d
	}
	s.markUnread()
	s.markReadings()
	s.joinRebindable()
	s.joinGroups()
	s.dropAmbiguous()
	s.joinWholes()
	return s
}

// dropNamesakes keeps the first of several devices of one name, that of the
// family listed first. A device that is there takes the place of one that could be made: it was
// made while the host was looked at.
func (f *found) dropNamesakes() {
	kept := f.devices[:0]
	for _, d := range f.devices {
		if len(kept) == 0 || kept[len(kept)-1].Name != d.Name {
			kept = append(kept, d)
			continue
		}
		before := &kept[len(kept)-1]
		switch {
		case ((*before).Making == nil) == (d.Making == nil):
			f.problems = append(f.problems, Problem{d.Family + " " + d.Name, fmt.Errorf("described by family %s too, whose description is kept", (*before).Family)})
		case d.Making == nil:
			*before = d
		}
	}
	f.devices = kept
}

// dropRepeated keeps one of several problems that say the same: more than one
// family looks at a device before it is known whose it is.
func (f *found) dropRepeated() {
	seen := make(map[string]bool)
	f.problems = slices.DeleteFunc(f.problems, func(p Problem) bool {
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

// markReadings gives devices whose family finds nothing wrong the worst of their
// other readings.
func (s *Snapshot) markReadings() {
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Health.Status == Healthy && len(d.Readings) > 0 {
			d.Health = d.Readings[0]
		}
	}
}

// joinWholes makes a device take all of the silicon that bears its name and
// that others are parts of, so that it is given out only without them. The
// device that mediated devices are made of is another family's, for example, and
// so may a physical function be. Parts that take nothing of their silicon then
// take one part of it each, which leaves them free of one another.
func (s *Snapshot) joinWholes() {
	parts := make(map[string][]*Device) // by their silicon
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

// takeAll makes the device all of the silicon of its parts.
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
	whole := &Silicon{Name: d.Name, Counters: all}
	d.PartOf, d.Takes = whole, all
	for _, part := range parts {
		part.PartOf = whole
	}
}
