package legacy

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
)

// taken is what containers hold of all resources on a host: what must not be
// handed out by another name.
type taken struct {
	holdings []*holding
	present  map[string]bool                         // the names of the devices that there are
	takes    map[string]map[string]resource.Quantity // what they take of their silicon, by their names
}

// taken returns what is held while a snapshot, which may be nil, is offered.
func (p *Plugin) taken(s *discovery.Snapshot) taken {
	t := taken{present: make(map[string]bool), takes: make(map[string]map[string]resource.Quantity)}
	t.holdings, _ = p.holdings.all()
	if s != nil {
		for _, d := range s.Devices {
			t.present[d.Name] = true
			t.takes[d.Name] = d.Takes
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
		if device := t.overlap(h, u); device != "" {
			return refusal(device, h, resource)
		}
	}
	return t.exhausted(resource, u)
}

// refusal says who has a device that something of a resource would need.
func refusal(device string, h *holding, resource string) string {
	if h.Resource == resource {
		return fmt.Sprintf("%s is held by %s as %s", device, h.who(), h.ID)
	}
	return fmt.Sprintf("%s is held by %s as %s %s", device, h.who(), h.Resource, h.ID)
}

// exhausted says who has so much of the silicon of a unit that there is too
// little left for it, "" if there is enough: all functions of an IOMMU group, or
// parts of which one is larger than others.
func (t taken) exhausted(resource string, u *unit) string {
	for i := range u.devices {
		d := &u.devices[i]
		if d.Shareable || d.PartOf == nil || len(d.Takes) == 0 {
			continue
		}
		total := maps.Clone(d.Takes)
		counted := u.deviceNames()
		for _, h := range t.holdings {
			if !slices.Contains(h.Silicon, d.PartOf.Name) {
				continue
			}
			for _, name := range h.Devices {
				if slices.Contains(counted, name) {
					continue
				}
				counted = append(counted, name)
				if exceeds(total, t.takes[name], d.PartOf.Counters) {
					return refusal(name, h, resource)
				}
			}
		}
	}
	return ""
}

// exceeds adds what another device takes to the total, of what is counted in
// it, and reports whether that is more than there is.
func exceeds(total, takes, all map[string]resource.Quantity) bool {
	for counter := range total {
		sum := total[counter].DeepCopy()
		sum.Add(takes[counter])
		total[counter] = sum
		if limit := all[counter]; sum.Cmp(limit) > 0 {
			return true
		}
	}
	return false
}

// overlap names a device of a holding that cannot be handed out with the unit
// too, "" if there is none: one that both have and one of them has alone, or
// what a device of the unit has become a part of it since. A whole that is
// still there beside its parts takes nothing from them unless they compete.
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
