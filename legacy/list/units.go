package list

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

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/topology"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/natural"
)

// Unit contains the devices of an ID: a single device, or several that are only allocated together,
// such as a card with two FPGAs. A shared unit has several IDs. A Unit is never modified.
type Unit struct {
	Name    string          // of the Offer, or of the only device
	IDs     []string        // in natural order
	Devices []rules.Offered // in name order

	// Counts is the capacity if each ID is a unit of a capacity, and "" if the IDs stand for the
	// devices.
	Counts resourceapi.QualifiedName

	// Pool means that containers get all usable devices of the unit.
	Pool bool

	place *topology.Place
}

// Offers are the offers of a snapshot for the kubelet. They are never modified.
type Offers struct {
	Units    map[string][]*Unit // by resource
	Problems []discovery.Problem
}

// BuildOffers returns the units of each resource that a snapshot offers. An offer that the kubelet
// would refuse becomes a problem and does not affect others. The same snapshot always gives the
// same result.
func BuildOffers(s *rules.Snapshot) *Offers {
	o := &Offers{Units: make(map[string][]*Unit)}
	resources := make(map[string]map[string]*Unit)
	for i := range s.Devices {
		d := &s.Devices[i]
		for _, offer := range d.Offers {
			if err := checkResource(offer.Resource); err != nil {
				o.Problems = append(o.Problems, discovery.Problem{Device: d.Name, Err: err})
				continue
			}
			if resources[offer.Resource] == nil {
				resources[offer.Resource] = make(map[string]*Unit)
			}
			join(resources[offer.Resource], *d, offer)
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(resources)) {
		units, problems := settleIDs(resource, slices.SortedFunc(maps.Values(resources[resource]), byName))
		for _, u := range units {
			u.complete()
		}
		units, long := fitUnits(resource, units)
		o.Units[resource] = units
		o.Problems = append(o.Problems, slices.Concat(problems, long)...)
	}
	return o
}

// complete computes the fields that depend on the unit's devices.
func (u *Unit) complete() {
	devices := make([]*discovery.Device, len(u.Devices))
	for i := range u.Devices {
		devices[i] = &u.Devices[i].Device
	}
	u.place = topology.PlaceOf(devices...)
}

// DeviceNames returns the names of the unit's devices.
func (u *Unit) DeviceNames() []string { return u.place.Names() }

// Silicon returns the names of the unit's physical devices, without devices with unlimited sharing.
func (u *Unit) Silicon() []string { return u.place.Silicon() }

// Grant returns the grant of a container for an ID of the unit, or for an additional share ID.
func (u *Unit) Grant(resource, id string, stock exclusion.Stock) *allocation.Grant {
	g := &allocation.Grant{Resource: resource, ID: id, Devices: u.DeviceNames(), Silicon: u.Silicon(), Exclusive: len(u.IDs) == 1}
	for i := range u.Devices {
		d := &u.Devices[i]
		g.HostFiles = append(g.HostFiles, d.FilesAs(resource)...)
		if stock != nil && !d.Shareable {
			g.Nodes = append(g.Nodes, exclusion.NodesOf(d.Name, stock)...)
		}
		if form := d.ShareForm().String(); form != "" {
			g.Form = form
		}
	}
	return g
}

// join adds a device to the unit in its offer. The keys of named units differ from those of devices
// without a unit.
func join(units map[string]*Unit, d rules.Offered, offer discovery.Offer) {
	key, name := "unit "+offer.Unit, offer.Unit
	if offer.Unit == "" {
		key, name = "device "+d.Name, d.Name
	}
	u := units[key]
	if u == nil {
		u = &Unit{Name: name, Counts: offer.Counts, Pool: offer.Pool}
		units[key] = u
	}
	if n := len(u.Devices); n == 0 || u.Devices[n-1].Name != d.Name {
		u.Devices = append(u.Devices, d)
	}
	u.IDs = append(u.IDs, offer.IDs...)
}

// with returns a unit with one more device and the IDs of its offer. The receiver may be nil.
func (u *Unit) with(d discovery.Device, offer discovery.Offer) *Unit {
	joined := &Unit{Name: d.Name, IDs: slices.Clone(offer.IDs), Devices: []rules.Offered{{Device: d}}}
	if u != nil {
		joined.Name, joined.IDs = u.Name, slices.Concat(u.IDs, offer.IDs)
		if slices.Contains(u.DeviceNames(), d.Name) {
			joined.Devices = nil
		}
		joined.Devices = slices.Concat(u.Devices, joined.Devices)
	}
	slices.SortFunc(joined.IDs, natural.CompareNames)
	joined.IDs = slices.Compact(joined.IDs)
	joined.complete()
	return joined
}

// settleIDs omits IDs that the kubelet cannot accept and IDs of earlier units. A single ID that is
// not UTF-8 would make the whole list impossible to send.
func settleIDs(resource string, units []*Unit) ([]*Unit, []discovery.Problem) {
	var problems []discovery.Problem
	var kept []*Unit
	owner := make(map[string]*Unit)
	for _, u := range units {
		slices.SortFunc(u.IDs, natural.CompareNames)
		u.IDs = slices.DeleteFunc(slices.Compact(u.IDs), func(id string) bool {
			var err error
			switch first := owner[id]; {
			case id == "":
				err = errors.New("empty ID")
			case !utf8.ValidString(id):
				err = fmt.Errorf("ID %q: not UTF-8", id)
			case first != nil:
				err = fmt.Errorf("ID %q: stands for %s already", id, first.Name)
			default:
				owner[id] = u
				return false
			}
			problems = append(problems, discovery.Problem{Device: u.Name, Err: fmt.Errorf("resource %s: %w", resource, err)})
			return true
		})
		if len(u.IDs) > 0 {
			kept = append(kept, u)
		}
	}
	return kept, problems
}

// checkResource returns an error if the kubelet would refuse to register a resource. The rules are
// those of IsExtendedResourceName in k8s.io/kubernetes/pkg/apis/core/v1/helper/helpers.go.
func checkResource(name string) error {
	const quotaPrefix = "requests." // prefix of the resource's name in a ResourceQuota
	if !strings.Contains(name, "/") || strings.Contains(name, "kubernetes.io/") || strings.HasPrefix(name, quotaPrefix) {
		return fmt.Errorf("resource %q: not the name of an extended resource, such as vendor.example/gpu", name)
	}
	if messages := validation.IsQualifiedName(quotaPrefix + name); len(messages) > 0 {
		return fmt.Errorf("resource %q: %s", name, strings.Join(messages, "; "))
	}
	return nil
}

// unusableReason returns the reason why a device of the unit cannot be allocated to a new pod. It
// returns "" if all devices can, or for a pool, if at least one can. Withheld physical devices must
// not be allocated, and are Unhealthy for the kubelet.
func (u *Unit) unusableReason(withheld map[string]string) (reason string) {
	usable := false
	for i := range u.Devices {
		d := &u.Devices[i]
		if why := withheld[d.Silicon()]; why != "" {
			return why
		}
		switch {
		case d.Health.IsUsable():
			usable = true
		case reason == "":
			reason = cmp.Or(d.Health.Reason, string(d.Health.Key()))
		}
	}
	if u.Pool && usable {
		return ""
	}
	return reason
}

// GivenDevices returns the devices that a container gets: all devices, or those of a pool that have
// their device nodes. An adapter whose port has no carrier is included, since the carrier may
// return while the container runs.
func (u *Unit) GivenDevices() []rules.Offered {
	if !u.Pool {
		return u.Devices
	}
	missing := func(d rules.Offered) bool { return d.Health.Key() == discovery.ConditionNodeMissing }
	return slices.DeleteFunc(slices.Clone(u.Devices), missing)
}

func byName(a, b *Unit) int {
	return cmp.Or(natural.CompareNames(a.Name, b.Name), slices.Compare(deviceNames(a), deviceNames(b)))
}

// deviceNames returns the names of a unit's devices before complete is called.
func deviceNames(u *Unit) (names []string) {
	for i := range u.Devices {
		names = append(names, u.Devices[i].Name)
	}
	return names
}
