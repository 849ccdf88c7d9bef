package rules

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apiserver/pkg/cel/environment"
	dracel "k8s.io/dynamic-resource-allocation/cel"

	"chandler.dev/discovery"
)

// Rules are what the administrator wants done with the devices of a host,
// with compiled expressions. They are data to [Rules.Apply] and say nothing of
// where they were written.
type Rules struct {
	Mode      discovery.Mode // for devices for which no Resource says another
	Exclude   []Selector
	Sharing   []Share
	Resources []Resource
	Overhead  []Overhead

	Allocation map[string]Allocation // by classic resource

	// Unknown says why it is not known what the administrator wants, "" if it is.
	// Nothing is offered anew then; see the agent's Place.
	Unknown string
}

// Resource renames the selected devices in the classic API, or names those that
// have IDs there and no name, and sets the API that offers them if Mode is set.
// A Named device it selects only by a name that the device itself offers.
type Resource struct {
	Selector
	Name string
	Mode *discovery.Mode

	// SRIOV makes the devices a pool of the SR-IOV network device plugin, nil for none.
	SRIOV *discovery.SRIOVPool

	// Want is what the devices are to be before the classic API lists them.
	Want discovery.Parameters
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
func (s Selector) Selects(d discovery.Device) (bool, error) {
	selected, _, err := s.compiled.DeviceMatches(context.Background(), dracel.Device{
		Driver:                   discovery.Domain,
		AllowMultipleAllocations: &d.Open,
		Attributes:               d.Attributes,
		Capacity:                 d.Capacity,
	})
	if err != nil {
		return false, fmt.Errorf("evaluate %q: %w", s.expression, err)
	}
	return selected, nil
}

// Apply returns the devices as the rules want them offered: without the excluded
// devices, shared, with the classic names and the modes that they say. What
// nobody named is not offered, and a Named device that nobody named is left
// out, as is a PoolOnly device that is in no pool. An expression that cannot be evaluated for a device does not
// select it and is reported as a problem.
//
// Devices that are parts of one piece of silicon must be offered by one API.
// Where the rules say otherwise, none of them is offered, and the problem
// names them. A name that some devices of a family bear of their own gives
// none to the others of that family: that of neuron cores is not what whole
// chips are to be had by. A device that the administrator made of paths is not offered
// either where one of its nodes is what another family offers, nor are units of
// the kind of such a device that nothing on the host shows: exclude that.
// A unit that has lost one of its Members is not offered for the others. A resource whose
// devices must be alike, and are not, has none.
func (r *Rules) Apply(s *discovery.Snapshot) *Snapshot {
	out := &Snapshot{Problems: slices.Clone(s.Problems), Gone: s.Gone, Allocation: r.Allocation}
	own, lists := ownNames(s), make(map[string]*counted)
	devices := r.joinWanted(s.Devices, own)
	for i := range devices {
		d := offeredAs(&devices[i])
		kept, errs := r.apply(&d, own[d.Family], lists)
		for _, err := range errs {
			out.Problems = append(out.Problems, discovery.Problem{Device: d.Name, Err: fmt.Errorf("config: %w", err)})
		}
		if kept {
			out.Devices = append(out.Devices, d)
		}
	}
	out.reportLong(lists)
	out.dropTaken()
	out.dropCounted()
	out.dropSplit()
	out.dropPartial()
	out.dropUnlike()
	return out
}

// joinWanted joins the functions of each IOMMU group of which a resource wants one under vfio.
func (r *Rules) joinWanted(devices []discovery.Device, own map[string]map[string]bool) []discovery.Device {
	if !slices.ContainsFunc(r.Resources, func(resource Resource) bool { return resource.Want[discovery.Driver] != "" }) {
		return devices
	}
	return discovery.JoinGroups(devices, func(device *discovery.Device) bool {
		d := offeredAs(device)
		selects := func(s Selector) bool {
			selected, err := s.Selects(*device)
			return selected && err == nil // errors are reported when the device is named
		}
		_, _ = r.name(&d, selects, own[d.Family], nil)
		return d.Want[discovery.Driver] != ""
	})
}

// offeredAs returns a device as it is offered where no rule concerns it. If its
// family says how many shares of it there are, that many containers may have it.
func offeredAs(d *discovery.Device) Offered {
	offered := Offered{Device: *d, Offers: d.Classic}
	if _, counted := d.Capacity[discovery.Shares]; counted {
		offered.Sharing = byNumber()
	}
	return offered
}

// ownNames returns the classic names that devices have of their own, in
// whatever mode of their plugin, by family.
func ownNames(s *discovery.Snapshot) map[string]map[string]bool {
	names := make(map[string]map[string]bool)
	for i := range s.Devices {
		d := &s.Devices[i]
		if names[d.Family] == nil {
			names[d.Family] = make(map[string]bool)
		}
		for _, offer := range d.Classic {
			names[d.Family][offer.Resource] = true
		}
	}
	return names
}

// apply changes the device, whose maps and slices are the host's, and reports
// whether it is kept. own are the names that devices of its family have, and lists
// what resources count out, to which the device's units are added.
func (r *Rules) apply(d *Offered, own map[string]bool, lists map[string]*counted) (kept bool, errs []error) {
	if d.Named && !slices.ContainsFunc(r.Resources, func(resource Resource) bool { return d.offers(resource.Name) }) {
		return false, nil // nobody asks for it, so nothing is to be said of it
	}
	selects := func(s Selector) bool {
		selected, err := s.Selects(d.Device)
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
	if d.PoolOnly == discovery.SharedPools && (share == nil || !share.Pool) {
		return false, nil // as above
	}
	kept, err := r.name(d, selects, own, share)
	if !kept && d.PoolOnly != "" {
		return false, nil // as above
	}
	if err != nil {
		errs = append(errs, err)
	}
	if share != nil {
		if err := share.apply(d, lists); err != nil {
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
func (d *Offered) publishNames() error {
	for _, offer := range d.Offers {
		if offer.NameAs == "" {
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
// is offered at all. A device that is shared under a name of its own needs no other.
func (r *Rules) name(d *Offered, selects func(Selector) bool, own map[string]bool, share *Share) (kept bool, err error) {
	d.Mode = r.Mode
	i := slices.IndexFunc(r.Resources, func(resource Resource) bool {
		return (d.offers(resource.Name) || !d.Named && !own[resource.Name]) && (d.PoolOnly != discovery.SRIOVPools || resource.SRIOV != nil) && selects(resource.Selector)
	})
	if i < 0 {
		if share == nil || share.Resource == "" {
			d.Offers = named(d.Offers)
		}
		return !d.Named && d.PoolOnly != discovery.SRIOVPools, nil
	}
	resource := r.Resources[i]
	if resource.Mode != nil {
		d.Mode = *resource.Mode
	}
	d.Want, d.SRIOV = resource.Want, resource.SRIOV
	d.Offers = renamed(d.Offers, resource.Name, resource.SRIOV != nil)
	if len(d.Offers) == 0 && d.Mode != discovery.ModeDRA {
		return true, fmt.Errorf("resource %s: the device has no ID in the classic API", resource.Name)
	}
	return true, nil
}

// offers reports whether the device has an offer of that resource.
func (d *Offered) offers(resource string) bool {
	return slices.ContainsFunc(d.Offers, func(offer discovery.Offer) bool { return offer.Resource == resource })
}

// renamed returns the offers under one other name. A device that was
// offered under several names keeps the IDs of that name, else those of its
// domain, else those of the first. In a pool of the SR-IOV network device plugin
// it has the IDs for such pools, if there are any. A device without an ID is not
// offered.
func renamed(offers []discovery.Offer, resource string, sriov bool) []discovery.Offer {
	domain, _, _ := strings.Cut(resource, "/")
	for _, fits := range []func(discovery.Offer) bool{
		func(offer discovery.Offer) bool { return offer.SRIOV && sriov },
		func(offer discovery.Offer) bool { return offer.Resource == resource },
		func(offer discovery.Offer) bool { return offer.Resource == domain+"/"+discovery.AnyName },
		func(offer discovery.Offer) bool { return !offer.Unnamed() || offer.Resource == discovery.AnyName },
	} {
		allowed := func(offer discovery.Offer) bool { return fits(offer) && (sriov || !offer.SRIOV) }
		if i := slices.IndexFunc(offers, allowed); i >= 0 {
			offer := offers[i]
			offer.Resource, offer.Named, offer.SRIOV = resource, false, false
			return []discovery.Offer{offer}
		}
	}
	return nil
}

// named returns the offers that have a name and need no administrator.
func named(offers []discovery.Offer) []discovery.Offer {
	unasked := func(offer discovery.Offer) bool { return offer.Unnamed() || offer.Named }
	if !slices.ContainsFunc(offers, unasked) {
		return offers
	}
	return slices.DeleteFunc(slices.Clone(offers), unasked)
}
