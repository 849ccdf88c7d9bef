package discovery

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// joinLooks makes a snapshot of what families found, and does what concerns all of
// them: devices that are used through one IOMMU group become one unit, a whole
// takes all that its parts take, and no two devices are known by one name,
// identity or classic ID. It reads nothing and modifies no look.
func joinLooks(looks []look) *Snapshot {
	var found []*Device
	var all look
	for _, l := range looks {
		for i := range l.Devices {
			found = append(found, &l.Devices[i])
		}
		all.Problems = append(all.Problems, l.Problems...)
	}
	all.sort(found)
	all.dropNamesakes()
	all.dropRepeated()
	return all.join()
}

// sort takes devices into the look in name order, those of one name in the order
// in which they were found. A device is large, so each is copied once.
func (l *look) sort(found []*Device) {
	slices.SortStableFunc(found, func(a, b *Device) int { return strings.Compare(a.Name, b.Name) })
	l.Devices = make([]Device, len(found))
	for i, d := range found {
		l.Devices[i] = *d
	}
}

// join makes a snapshot of a look of all families, whose devices are in name
// order.
func (l look) join() *Snapshot {
	s := &Snapshot{Devices: slices.Clone(l.Devices), Problems: slices.Clone(l.Problems), found: l}
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
func (l *look) dropNamesakes() {
	kept := 0
	for i := range l.Devices {
		if d := &l.Devices[i]; kept > 0 && l.Devices[kept-1].Name == d.Name {
			before := &l.Devices[kept-1]
			if (before.Making == nil) != (d.Making == nil) {
				if d.Making == nil {
					*before = *d
				}
				continue
			}
			l.Problems = append(l.Problems, Problem{d.Family + " " + d.Name, fmt.Errorf("described by family %s too, whose description is kept", before.Family)})
			continue
		}
		if kept != i {
			l.Devices[kept] = l.Devices[i]
		}
		kept++
	}
	l.Devices = l.Devices[:kept]
}

// dropRepeated keeps one of several problems that say the same: more than one
// family looks at a device before it is known whose it is.
func (l *look) dropRepeated() {
	seen := make(map[string]bool)
	l.Problems = slices.DeleteFunc(l.Problems, func(p Problem) bool {
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
