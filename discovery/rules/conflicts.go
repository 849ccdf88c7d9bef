package rules

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// addProblem adds a problem of a device or a resource.
func (s *Snapshot) addProblem(what string, err error) {
	s.Problems = append(s.Problems, discovery.Problem{Device: what, Err: fmt.Errorf("config: %w", err)})
}

// dropTaken removes every configured device with a device node of another family's device. Common
// nodes, such as /dev/vfio/vfio, and nodes of devices with unlimited sharing cause no conflict.
func (s *Snapshot) dropTaken() {
	owners := make(map[string]*Offered) // by node
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.FromConfig || d.Shareable {
			continue
		}
		for _, node := range d.OwnNodes() {
			if owners[node.HostPath] == nil {
				owners[node.HostPath] = d
			}
		}
	}
	var kept []Offered
	for _, d := range s.Devices {
		i := slices.IndexFunc(d.Edits.DeviceNodes, func(node *specs.DeviceNode) bool { return owners[node.HostPath] != nil })
		if !d.FromConfig || i < 0 {
			kept = append(kept, d)
			continue
		}
		node := d.Edits.DeviceNodes[i].HostPath
		s.addProblem(d.Name, fmt.Errorf("%s is that of device %s of family %s, which is not excluded", node, owners[node].Name, owners[node].Family))
	}
	s.Devices = kept
}

// dropCounted removes the administrator's counted units if a device of the same kind is available,
// because the units and the device may be the same physical device. The kind "other" is too general
// for this rule.
func (s *Snapshot) dropCounted() {
	found := make(map[string]*Offered) // one device of each kind
	for i := range s.Devices {
		if d := &s.Devices[i]; !d.FromConfig && len(d.Edits.DeviceNodes) > 0 {
			found[d.Attributes.String("kind")] = d
		}
	}
	delete(found, "other")
	said := make(map[string]bool)
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d Offered) bool {
		kind, resource := d.Attributes.String("kind"), d.Attributes.String("resource")
		other := found[kind]
		if !d.FromConfig || d.Source != discovery.Unseen || other == nil {
			return false
		}
		if !said[resource] {
			said[resource] = true
			s.addProblem(resource, fmt.Errorf("its units may be of device %s of family %s, which is of kind %s too and not excluded", other.Name, other.Family, kind))
		}
		return true
	})
}

// ErrSplit is wrapped by the problem of a device that is left out because the rules offer devices
// of one physical device by both APIs.
var ErrSplit = errors.New("its silicon is given to two APIs; choose one mode for all of its devices")

// dropSplit removes every device of a physical device if the modes of its devices differ.
func (s *Snapshot) dropSplit() {
	modes := make(map[string]discovery.Mode)
	split := make(map[string]bool)
	for i := range s.Devices {
		d := &s.Devices[i]
		if mode, seen := modes[d.Silicon()]; seen && mode != d.Mode {
			split[d.Silicon()] = true
		}
		modes[d.Silicon()] = d.Mode
	}
	s.Devices = slices.DeleteFunc(s.Devices, func(d Offered) bool {
		if split[d.Silicon()] {
			s.addProblem(d.Name, ErrSplit)
		}
		return split[d.Silicon()]
	})
}

// dropPartial removes the offers of units if some devices of the unit lack the offer. An incomplete
// card is not offered.
func (s *Snapshot) dropPartial() {
	var offers [][]discovery.Offer
	for i := range s.Devices {
		offers = append(offers, s.Devices[i].Offers)
	}
	members := discovery.MemberCounter(offers)
	for i := range s.Devices {
		d := &s.Devices[i]
		partial := func(offer discovery.Offer) bool { return members(offer) < offer.Members }
		if !slices.ContainsFunc(d.Offers, partial) {
			continue
		}
		d.Offers = slices.DeleteFunc(slices.Clone(d.Offers), func(offer discovery.Offer) bool {
			if partial(offer) {
				s.addProblem(d.Name, fmt.Errorf("resource %s: %s is given with all of its %d devices, of which %d have the name", offer.Resource, offer.Unit, offer.Members, members(offer)))
			}
			return partial(offer)
		})
	}
}

// dropUnlike removes the offers of resources whose devices differ in an attribute of MatchAttributes. The device
// plugin API only counts devices, so a container cannot choose between them.
func (s *Snapshot) dropUnlike() {
	for _, resource := range slices.Sorted(maps.Keys(s.Allocation)) {
		err := s.compareAttributes(resource, s.Allocation[resource].MatchAttributes)
		if err == nil {
			continue
		}
		s.addProblem(resource, err)
		for i := range s.Devices {
			if d := &s.Devices[i]; d.hasOffer(resource) {
				d.Offers = slices.DeleteFunc(slices.Clone(d.Offers), func(offer discovery.Offer) bool { return offer.Resource == resource })
			}
		}
	}
}

// compareAttributes returns an error that names two devices of a resource with different
// attributes.
func (s *Snapshot) compareAttributes(resource string, attributes []resourceapi.QualifiedName) error {
	var first *Offered
	for i := range s.Devices {
		d := &s.Devices[i]
		switch {
		case !d.hasOffer(resource):
			continue
		case first == nil:
			first = d
		}
		for _, name := range attributes {
			if a, b := valueOf(first, name), valueOf(d, name); a != b {
				return fmt.Errorf("no device is offered under this name, since matchAttributes requires equal values: device %s has %s, device %s has %s", first.Name, a, d.Name, b)
			}
		}
	}
	return nil
}

// valueOf returns an attribute of a device with its name, as text.
func valueOf(d *Offered, name resourceapi.QualifiedName) string {
	values := discovery.Values(d.Attributes[name].ForSlice())
	if len(values) == 0 {
		return fmt.Sprintf("no %s", name)
	}
	return fmt.Sprintf("%s %s", name, strings.Join(values, ", "))
}
