package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apiserver/pkg/cel/environment"
	dracel "k8s.io/dynamic-resource-allocation/cel"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Rules are what the administrator wants done with the devices of a host,
// with compiled expressions. They are data to [Rules.Apply] and say nothing of
// where they were written.
type Rules struct {
	Mode      Mode // for devices for which no Resource says another
	Exclude   []Selector
	Sharing   []Share
	Resources []Resource
	Overhead  []Overhead
}

// Resource renames the selected devices in the classic API, or names those that
// have IDs there and no name, and sets the API that offers them if Mode is set.
// An OptIn device it selects only by a name that the device itself offers.
type Resource struct {
	Selector
	Name string
	Mode *Mode

	// Want is what the devices are to be before the classic API lists them.
	Want Parameters
}

// Selector is a compiled CEL expression over a device, in the language of
// DeviceClasses.
type Selector struct {
	expression string
	compiled   dracel.CompilationResult
}

// Compile compiles a CEL expression.
func Compile(expression string) (Selector, error) {
	compiler := dracel.GetCompiler(dracel.Features{EnableConsumableCapacity: true})
	newExpressions := environment.NewExpressions
	compiled := compiler.CompileCELExpression(expression, dracel.Options{EnvType: &newExpressions})
	if compiled.Error != nil {
		return Selector{}, fmt.Errorf("compile %q: %w", expression, compiled.Error)
	}
	return Selector{expression, compiled}, nil
}

// Selects reports whether the expression holds for the device. An expression
// that reads an attribute which the device does not have is an error.
func (s Selector) Selects(d Device) (bool, error) {
	selected, _, err := s.compiled.DeviceMatches(context.Background(), dracel.Device{
		Driver:                   Domain,
		AllowMultipleAllocations: &d.Shareable,
		Attributes:               d.Attributes,
		Capacity:                 d.Capacity,
	})
	if err != nil {
		return false, fmt.Errorf("evaluate %q: %w", s.expression, err)
	}
	return selected, nil
}

// Apply returns the snapshot as the rules want it: without the excluded
// devices, shared, with the classic names and the modes that they say. What
// nobody named is not offered, and an OptIn device that nobody named is left
// out. An expression that cannot be evaluated for a device does not
// select it and is reported as a problem.
//
// Devices that are parts of one piece of silicon must be offered by one API.
// Where the rules say otherwise, none of them is offered, and the problem
// names them. A name that some devices of a family bear of their own gives
// none to the others of that family: that of neuron cores is not what whole
// chips are to be had by. A device that the administrator made of paths is not offered
// either where one of its nodes is what another family offers, nor are units of
// the kind of such a device that nothing on the host shows: exclude that.
// A unit that has lost one of its Members is not offered for the others.
func (r *Rules) Apply(s *Snapshot) *Snapshot {
	out := &Snapshot{Problems: slices.Clone(s.Problems), Gone: s.Gone}
	own := s.ownNames()
	for _, d := range s.Devices {
		kept, errs := r.apply(&d, own[d.Family])
		for _, err := range errs {
			out.Problems = append(out.Problems, Problem{d.Name, fmt.Errorf("config: %w", err)})
		}
		if kept {
			out.Devices = append(out.Devices, d)
		}
	}
	out.dropTaken()
	out.dropCounted()
	out.dropSplit()
	out.dropPartial()
	return out
}

// ownNames returns the classic names that devices have of their own, in
// whatever mode of their plugin, by family.
func (s *Snapshot) ownNames() map[string]map[string]bool {
	names := make(map[string]map[string]bool)
	for _, d := range s.Devices {
		if names[d.Family] == nil {
			names[d.Family] = make(map[string]bool)
		}
		for _, offer := range d.Offers {
			names[d.Family][offer.Resource] = true
		}
	}
	return names
}

// apply changes the device, which is a copy whose slices are shared with the
// original, and reports whether it is kept. own are the names that devices of
// its family have.
func (r *Rules) apply(d *Device, own map[string]bool) (kept bool, errs []error) {
	if d.OptIn && !slices.ContainsFunc(r.Resources, func(resource Resource) bool { return d.offers(resource.Name) }) {
		return false, nil // nobody asks for it, so nothing is to be said of it
	}
	selects := func(s Selector) bool {
		selected, err := s.Selects(*d)
		if err != nil {
			errs = append(errs, err)
		}
		return selected
	}
	if slices.ContainsFunc(r.Exclude, selects) {
		return false, errs
	}
	d.Overhead = r.overhead(selects)
	share := r.shared(selects)
	kept, err := r.name(d, selects, own, share)
	if err != nil {
		errs = append(errs, err)
	}
	if share != nil {
		if err := share.apply(d); err != nil {
			errs = append(errs, err)
		}
	}
	if err := d.publishNames(); err != nil {
		errs = append(errs, err)
	}
	return kept, errs
}

// publishNames sets the attributes that say under which names the device is
// offered.
func (d *Device) publishNames() error {
	for _, offer := range d.Offers {
		if offer.NameAs == "" || offer.Resource == "" {
			continue
		}
		if n := len(d.Attributes) + len(d.Capacity); n >= resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
			return fmt.Errorf("resource %s: no room for the attribute %s beside %d attributes and capacities", offer.Resource, offer.NameAs, n)
		}
		if len(offer.Resource) > resourceapi.DeviceAttributeMaxValueLength {
			return fmt.Errorf("resource %s: too long for the attribute %s", offer.Resource, offer.NameAs)
		}
		d.Attributes = maps.Clone(d.Attributes)
		d.Attributes.SetString(offer.NameAs, offer.Resource)
	}
	return nil
}

// name gives the device its mode and its classic names, and reports whether it
// is offered at all. What is to be shared under a name of its own needs no other.
func (r *Rules) name(d *Device, selects func(Selector) bool, own map[string]bool, share *Share) (kept bool, err error) {
	d.Mode = r.Mode
	i := slices.IndexFunc(r.Resources, func(resource Resource) bool {
		return (d.offers(resource.Name) || !d.OptIn && !own[resource.Name]) && selects(resource.Selector)
	})
	if i < 0 {
		if share == nil || share.Resource == "" {
			d.Offers = named(d.Offers)
		}
		return !d.OptIn, nil
	}
	resource := r.Resources[i]
	if resource.Mode != nil {
		d.Mode = *resource.Mode
	}
	d.Want = resource.Want
	d.Offers = renamed(d.Offers, resource.Name)
	if len(d.Offers) == 0 && d.Mode != ModeDRA {
		return true, fmt.Errorf("resource %s: the device has no ID in the classic API", resource.Name)
	}
	return true, nil
}

// dropCounted leaves out the units that the administrator counted where there
// are devices of their kind that can be had: they may be the same silicon. Of the
// kind "other" nothing can be said.
func (s *Snapshot) dropCounted() {
	found := make(map[string]*Device) // one of each kind
	for i := range s.Devices {
		if d := &s.Devices[i]; !d.Configured && len(d.Edits.DeviceNodes) > 0 {
			found[d.Attributes.String("kind")] = d
		}
	}
	delete(found, "other")
	said := make(map[string]bool)
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d Device) bool {
		kind, resource := d.Attributes.String("kind"), d.Attributes.String("resource")
		other := found[kind]
		if !d.Configured || d.Source != Unseen || other == nil {
			return false
		}
		if !said[resource] {
			said[resource] = true
			s.Problems = append(s.Problems, Problem{resource, fmt.Errorf("config: its units may be of device %s of family %s, which is of kind %s too and not excluded", other.Name, other.Family, kind)})
		}
		return true
	})
}

// offers reports whether the device has an offer of that resource.
func (d *Device) offers(resource string) bool {
	return slices.ContainsFunc(d.Offers, func(offer Offer) bool { return offer.Resource == resource })
}

// renamed returns the offers under one other name. What was offered under
// several names keeps the IDs of that one, else those of its domain, else those
// of the first; what has no ID is not offered.
func renamed(offers []Offer, resource string) []Offer {
	domain, _, _ := strings.Cut(resource, "/")
	for _, fits := range []func(Offer) bool{
		func(offer Offer) bool { return offer.Resource == resource },
		func(offer Offer) bool { return offer.Within == domain },
		func(offer Offer) bool { return offer.Within == "" },
	} {
		if i := slices.IndexFunc(offers, fits); i >= 0 {
			offer := offers[i]
			offer.Resource, offer.Optional, offer.Within = resource, false, ""
			return []Offer{offer}
		}
	}
	return nil
}

// named returns the offers that have a name and need no administrator.
func named(offers []Offer) []Offer {
	unasked := func(offer Offer) bool { return offer.Resource == "" || offer.Optional }
	if !slices.ContainsFunc(offers, unasked) {
		return offers
	}
	return slices.DeleteFunc(slices.Clone(offers), unasked)
}

// dropSplit leaves out every device of a piece of silicon whose devices are
// of several modes.
func (s *Snapshot) dropSplit() {
	modes := make(map[string]Mode)
	split := make(map[string]bool)
	for i := range s.Devices {
		d := &s.Devices[i]
		if mode, seen := modes[d.Silicon()]; seen && mode != d.Mode {
			split[d.Silicon()] = true
		}
		modes[d.Silicon()] = d.Mode
	}
	s.Devices = slices.DeleteFunc(s.Devices, func(d Device) bool {
		if !split[d.Silicon()] {
			return false
		}
		s.Problems = append(s.Problems, Problem{d.Name, errSplit})
		return true
	})
}

// dropTaken leaves out every configured device that has the node of another
// family's device. A node that several pieces of silicon have, such as
// /dev/vfio/vfio, is that of none, and any number may have what is shareable.
func (s *Snapshot) dropTaken() {
	owners := make(map[string][]*Device) // one of each piece of silicon, by node
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.Configured || d.Shareable {
			continue
		}
		for _, node := range d.Edits.DeviceNodes {
			same := func(other *Device) bool { return other.Silicon() == d.Silicon() }
			if !slices.ContainsFunc(owners[node.HostPath], same) {
				owners[node.HostPath] = append(owners[node.HostPath], d)
			}
		}
	}
	var kept []Device
	for _, d := range s.Devices {
		i := slices.IndexFunc(d.Edits.DeviceNodes, func(node *specs.DeviceNode) bool { return len(owners[node.HostPath]) == 1 })
		if !d.Configured || i < 0 {
			kept = append(kept, d)
			continue
		}
		node := d.Edits.DeviceNodes[i].HostPath
		s.Problems = append(s.Problems, Problem{d.Name, fmt.Errorf("config: %s is that of device %s of family %s, which is not excluded", node, owners[node][0].Name, owners[node][0].Family)})
	}
	s.Devices = kept
}

var errSplit = errors.New("config: its silicon is given to two APIs; choose one mode for all of its devices")
