package legacy

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
)

// unit is what one ID stands for: one device, or several that are only handed
// out together. It has several IDs if it is shared. A unit is never modified.
type unit struct {
	name    string             // of the Offer, or of its only device
	ids     []string           // in natural order
	devices []discovery.Device // in name order

	counts resourceapi.QualifiedName // the capacity of which each ID is a unit, "" if the IDs stand for the devices
}

// offered returns the units of each resource that a snapshot offers. What
// cannot be offered to the kubelet is a problem and hides nothing else. The
// answer is the same for the same snapshot.
func offered(s *discovery.Snapshot) (map[string][]*unit, []discovery.Problem) {
	resources := make(map[string]map[string]*unit)
	var problems []discovery.Problem
	for _, d := range s.Devices {
		for _, offer := range d.Offers {
			if err := checkResource(offer.Resource); err != nil {
				problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
				continue
			}
			if resources[offer.Resource] == nil {
				resources[offer.Resource] = make(map[string]*unit)
			}
			join(resources[offer.Resource], d, offer)
		}
	}
	units := make(map[string][]*unit, len(resources))
	for _, resource := range slices.Sorted(maps.Keys(resources)) {
		var own []discovery.Problem
		units[resource], own = settle(resource, slices.SortedFunc(maps.Values(resources[resource]), byName))
		problems = append(problems, own...)
	}
	return units, problems
}

// join adds a device to the unit that its offer names. Devices without one are
// told from named units by their key.
func join(units map[string]*unit, d discovery.Device, offer discovery.Offer) {
	key, name := "unit "+offer.Unit, offer.Unit
	if offer.Unit == "" {
		key, name = "device "+d.Name, d.Name
	}
	u := units[key]
	if u == nil {
		u = &unit{name: name, counts: offer.Counts}
		units[key] = u
	}
	if n := len(u.devices); n == 0 || u.devices[n-1].Name != d.Name {
		u.devices = append(u.devices, d)
	}
	u.ids = append(u.ids, offer.IDs...)
}

// with returns a unit that stands for a device too, by the IDs of its offer.
// The unit may be nil.
func (u *unit) with(d discovery.Device, offer discovery.Offer) *unit {
	if u == nil {
		return &unit{name: d.Name, ids: offer.IDs, devices: []discovery.Device{d}}
	}
	joined := &unit{name: u.name, ids: slices.Concat(u.ids, offer.IDs), devices: u.devices}
	if !slices.Contains(u.deviceNames(), d.Name) {
		joined.devices = slices.Concat(u.devices, []discovery.Device{d})
	}
	slices.SortFunc(joined.ids, natural)
	joined.ids = slices.Compact(joined.ids)
	return joined
}

// settle leaves out the IDs that the kubelet could not take and those that
// stand for another unit already. One that is not UTF-8 would make the whole
// list impossible to send.
func settle(resource string, units []*unit) ([]*unit, []discovery.Problem) {
	var problems []discovery.Problem
	var kept []*unit
	owner := make(map[string]*unit)
	for _, u := range units {
		slices.SortFunc(u.ids, natural)
		u.ids = slices.DeleteFunc(slices.Compact(u.ids), func(id string) bool {
			var err error
			switch first := owner[id]; {
			case id == "":
				err = errors.New("empty ID")
			case !utf8.ValidString(id):
				err = fmt.Errorf("ID %q: not UTF-8", id)
			case first != nil:
				err = fmt.Errorf("ID %q: stands for %s already", id, first.name)
			default:
				owner[id] = u
				return false
			}
			problems = append(problems, discovery.Problem{Device: u.name, Err: fmt.Errorf("resource %s: %w", resource, err)})
			return true
		})
		if len(u.ids) > 0 {
			kept = append(kept, u)
		}
	}
	return kept, problems
}

// checkResource says why the kubelet would refuse to register a resource, nil
// if it would not. The rules are those of IsExtendedResourceName in
// k8s.io/kubernetes/pkg/apis/core/v1/helper/helpers.go.
func checkResource(name string) error {
	const quotaPrefix = "requests." // a ResourceQuota names the resource so
	if !strings.Contains(name, "/") || strings.Contains(name, "kubernetes.io/") || strings.HasPrefix(name, quotaPrefix) {
		return fmt.Errorf("resource %q: not the name of an extended resource, such as vendor.example/gpu", name)
	}
	if messages := validation.IsQualifiedName(quotaPrefix + name); len(messages) > 0 {
		return fmt.Errorf("resource %q: %s", name, strings.Join(messages, "; "))
	}
	return nil
}

// silicon names what of the unit only one API may hold: that of its devices,
// less the shareable ones.
func (u *unit) silicon() []string {
	var names []string
	for i := range u.devices {
		if d := &u.devices[i]; !d.Shareable {
			names = append(names, d.Silicon())
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// deviceNames returns the names of the unit's devices.
func (u *unit) deviceNames() []string {
	names := make([]string, len(u.devices))
	for i := range u.devices {
		names[i] = u.devices[i].Name
	}
	return names
}

// sick says why one of the unit's devices cannot be given to a new pod, "" if
// all can. One that is withheld must not be handed out, which the kubelet
// understands as Unhealthy.
func (u *unit) sick() (reason string) {
	for _, d := range u.devices {
		switch {
		case d.Withheld != "":
			return d.Withheld
		case reason == "" && !d.Health.Usable():
			reason = cmp.Or(d.Health.Reason, string(d.Health.Key()))
		}
	}
	return reason
}

// numaNodes returns the NUMA nodes of the unit's devices, in order, less those
// that are not known.
func (u *unit) numaNodes() []int64 {
	var nodes []int64
	for _, d := range u.devices {
		attribute := d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode]
		if attribute.IntValue != nil {
			nodes = append(nodes, *attribute.IntValue)
		}
		nodes = append(nodes, attribute.IntValues...)
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// attribute returns a string attribute of the unit's first device that has it.
func (u *unit) attribute(name resourceapi.QualifiedName) string {
	for _, d := range u.devices {
		if value := d.Attributes.String(name); value != "" {
			return value
		}
	}
	return ""
}

// linkedTo returns the names of the devices at the other ends of private links.
func (u *unit) linkedTo() (names []string) {
	for i := range u.devices {
		names = append(names, u.devices[i].Names("linkedTo")...)
	}
	return names
}

func byName(a, b *unit) int {
	return cmp.Or(natural(a.name, b.name), slices.Compare(a.deviceNames(), b.deviceNames()))
}

// natural orders strings as a person would: "gpu9" before "gpu10".
func natural(a, b string) int {
	x, y := a, b
	for x != "" && y != "" {
		m, n := digits(x), digits(y)
		if m == 0 || n == 0 {
			if x[0] != y[0] {
				return cmp.Compare(x[0], y[0])
			}
			x, y = x[1:], y[1:]
			continue
		}
		number, other := strings.TrimLeft(x[:m], "0"), strings.TrimLeft(y[:n], "0")
		if order := cmp.Or(cmp.Compare(len(number), len(other)), strings.Compare(number, other)); order != 0 {
			return order
		}
		x, y = x[m:], y[n:]
	}
	return cmp.Or(cmp.Compare(len(x), len(y)), strings.Compare(a, b))
}

// digits counts the decimal digits that s begins with.
func digits(s string) int {
	return len(s) - len(strings.TrimLeft(s, "0123456789"))
}
