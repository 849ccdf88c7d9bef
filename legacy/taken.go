package legacy

import (
	"fmt"
	"slices"

	"chandler.dev/discovery"
)

// taken is what containers hold of all resources on a host: what must not be
// handed out by another name.
type taken struct {
	holdings []*holding
	present  map[string]bool // the names of the devices that there are
}

// taken returns what is held while a snapshot, which may be nil, is offered.
func (p *Plugin) taken(s *discovery.Snapshot) taken {
	t := taken{present: make(map[string]bool)}
	t.holdings, _ = p.holdings.all()
	if s != nil {
		for _, d := range s.Devices {
			t.present[d.Name] = true
		}
	}
	return t
}

// from says who has something of a unit by another resource or by an ID that
// is none of the unit's, "" if nobody has. The other IDs of the unit are shares
// of it, which any number of containers have.
func (t taken) from(resource string, u *unit) string {
	for _, h := range t.holdings {
		if h.Resource == resource && slices.Contains(u.ids, h.ID) {
			continue
		}
		device := t.overlap(h, u)
		switch {
		case device == "":
		case h.Resource == resource:
			return fmt.Sprintf("%s is held by %s as %s", device, h.who(), h.ID)
		default:
			return fmt.Sprintf("%s is held by %s as %s %s", device, h.who(), h.Resource, h.ID)
		}
	}
	return ""
}

// overlap names a device of a holding that cannot be handed out with the unit
// too, "" if there is none: one that both have and one of them has alone, or
// what a device of the unit has become a part of it since. A whole that is
// still there beside its parts, as a physical function is beside its virtual
// ones, takes nothing from them unless they compete.
func (t taken) overlap(h *holding, u *unit) string {
	for i := range u.devices {
		d := &u.devices[i]
		if d.Shareable {
			continue
		}
		if slices.Contains(h.Devices, d.Name) && (h.Exclusive || len(u.ids) == 1) {
			return d.Name
		}
		whole := d.Silicon()
		competes := d.PartOf != nil && len(d.PartOf.Counters) > 0
		switch {
		case !h.Exclusive || !slices.Contains(h.Silicon, whole):
		case slices.Contains(h.Devices, whole) && (competes || !t.present[whole]):
			return whole
		case competes && d.Name == whole:
			return h.Devices[0]
		}
	}
	return ""
}
