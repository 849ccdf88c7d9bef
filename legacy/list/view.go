package list

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
)

// Had is an ID that a container has, or is about to have.
type Had struct {
	Resource, ID string
	Owner        string   // in words
	Devices      []string // what the ID stood for
	Silicon      []string // what of that is accounted for
	Exclusive    bool     // the devices had no other ID in the resource
	Ours         bool     // of a resource of ours, under which it stays listed
}

// View is what containers have at one moment. It is never modified.
type View struct {
	ids       map[string]map[string]*Had // ours, by resource and ID
	devices   map[string][]*Had          // by the names of devices
	silicon   map[string][]*Had
	elsewhere map[string]string
}

// NewView returns what is had: IDs, and silicon through the other API with its
// owner.
func NewView(had []*Had, elsewhere map[string]string) *View {
	v := &View{
		ids:       make(map[string]map[string]*Had),
		devices:   make(map[string][]*Had),
		silicon:   make(map[string][]*Had),
		elsewhere: elsewhere,
	}
	for _, h := range had {
		if h.Ours {
			if v.ids[h.Resource] == nil {
				v.ids[h.Resource] = make(map[string]*Had)
			}
			v.ids[h.Resource][h.ID] = h
		}
		for _, name := range h.Devices {
			v.devices[name] = append(v.devices[name], h)
		}
		for _, name := range h.Silicon {
			v.silicon[name] = append(v.silicon[name], h)
		}
	}
	return v
}

// Blocked says who keeps a unit of a resource from everybody, "" if nobody does:
// somebody has its silicon through the other API, or something of it by another
// resource or by an ID that is none of the unit's. The other IDs of a unit are
// shares of it, which any number of containers have.
func (v *View) Blocked(resource string, u *Unit, o *Offers) string {
	if why := v.taken(resource, u, o); why != "" {
		return why
	}
	return v.claimed(u)
}

// claimed says who has silicon of the unit through the other API.
func (v *View) claimed(u *Unit) string {
	for _, silicon := range u.silicon {
		if owner, had := v.elsewhere[silicon]; had {
			return fmt.Sprintf("%s is held by %s", silicon, owner)
		}
	}
	return ""
}

// taken says who has something of the unit by another resource or ID.
func (v *View) taken(resource string, u *Unit, o *Offers) string {
	own := func(h *Had) bool { return h.Resource == resource && u.has(h.ID) }
	for i := range u.Devices {
		d := &u.Devices[i]
		if d.Shareable {
			continue
		}
		for _, h := range v.devices[d.Name] {
			if (h.Exclusive || len(u.IDs) == 1) && !own(h) {
				return refusal(d.Name, h, resource)
			}
		}
		for _, h := range v.silicon[d.Silicon()] {
			if device := o.rivals(h, d); device != "" && !own(h) {
				return refusal(device, h, resource)
			}
		}
	}
	for i := range u.Devices {
		if why := v.exhausted(resource, u, &u.Devices[i], o); why != "" {
			return why
		}
	}
	return ""
}

// rivals names the device that somebody has and that cannot be handed out
// together with another of its silicon, "" if they can: a whole and a part of it,
// if they compete. A whole that is there no more has become its parts.
func (o *Offers) rivals(h *Had, d *discovery.Device) string {
	if !h.Exclusive {
		return ""
	}
	whole := d.Silicon()
	competes := d.PartOf != nil && len(d.PartOf.Counters) > 0
	switch {
	case slices.Contains(h.Devices, whole) && (competes || o.devices[whole] == nil):
		return whole
	case competes && d.Name == whole:
		return h.Devices[0]
	}
	return ""
}

// exhausted says who has so much of a device's silicon that too little is left
// for it, "" if there is enough: all functions of an IOMMU group, or parts of
// which one is larger than others.
func (v *View) exhausted(resource string, u *Unit, d *discovery.Device, o *Offers) string {
	if d.Shareable || d.PartOf == nil || len(d.Takes) == 0 {
		return ""
	}
	total := maps.Clone(d.Takes)
	counted := make(map[string]bool)
	for _, name := range u.names {
		counted[name] = true
	}
	for _, h := range v.silicon[d.PartOf.Name] {
		for _, name := range h.Devices {
			if counted[name] {
				continue
			}
			counted[name] = true
			if other := o.devices[name]; other != nil && exceeds(total, other.Takes, d.PartOf.Counters) {
				return refusal(name, h, resource)
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

// refusal says who has a device that something of a resource would need.
func refusal(device string, h *Had, resource string) string {
	if h.Resource == resource {
		return fmt.Sprintf("%s is held by %s as %s", device, h.Owner, h.ID)
	}
	return fmt.Sprintf("%s is held by %s as %s %s", device, h.Owner, h.Resource, h.ID)
}

// standsFor says who has the ID as other devices than those of a unit, "" if
// nobody has.
func (h *Had) standsFor(u *Unit) string {
	if h == nil || len(h.Devices) == 0 || slices.Equal(h.Devices, u.names) {
		return ""
	}
	return fmt.Sprintf("%s has it as %s", h.Owner, strings.Join(h.Devices, ", "))
}
