package rules

import (
	"cmp"
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

// Rules are the administrator's configuration for the devices of a host, with compiled expressions.
// They do not depend on the source of the configuration.
type Rules struct {
	Mode      discovery.Mode // for devices without a mode from Resources
	Exclude   []Selector
	Sharing   []Share
	Resources []Resource
	Overhead  []Overhead

	// Forms are, by device, forms that replace the results of Sharing and Exclude: devices with a form
	// are not excluded. Optional.
	Forms map[string]ShareForm

	Allocation map[string]Allocation // by extended resource

	// Attributes are the attributes that ResourceSlices have in addition to the default ones.
	Attributes []resourceapi.QualifiedName

	// ReportOnly means that no device is offered.
	ReportOnly bool

	// Unknown is the reason why the configuration is unknown, "" if it is known. If the
	// configuration is unknown, no further devices are offered; see the agent's Place.
	Unknown string
}

// WithheldReason returns why all devices are withheld, or "".
func (r *Rules) WithheldReason() string {
	if r.ReportOnly {
		return cmp.Or(r.Unknown, "the mode is ReportOnly")
	}
	return r.Unknown
}

// Resource renames the selected devices in the device plugin API, or names devices with IDs but
// without a name, and sets the API of the devices if Mode is set. An OptIn device is selected only
// if Name is one of the device's own offers.
type Resource struct {
	Selector
	Name string
	Mode *discovery.Mode

	// SRIOV makes the devices a pool of the SR-IOV network device plugin, nil for none.
	SRIOV *discovery.SRIOVPool

	// Want is the required configuration of the devices before the device plugin API lists them.
	Want discovery.Parameters
}

// Selector is a compiled CEL expression over a device, in the language of DeviceClasses.
type Selector struct {
	expression string
	compiled   dracel.CompilationResult
	entry      string // as in ExpressionError
}

// ExpressionError is the error of an expression that cannot be evaluated for a device, such as one
// that reads an attribute that the device does not have.
type ExpressionError struct {
	Entry      string // the field of the configuration, such as exclude[0].cel, or ""
	Expression string
	Device     string // its name
	Err        error
}

// Error implements error.
func (e *ExpressionError) Error() string {
	text := fmt.Sprintf("evaluate %s: %s", e.Expression, e.Err)
	if e.Entry != "" {
		return e.Entry + ": " + text
	}
	return text
}

// Unwrap returns the cause.
func (e *ExpressionError) Unwrap() error { return e.Err }

// Compile compiles a CEL expression.
func Compile(expression string) (Selector, error) {
	compiler := dracel.GetCompiler(dracel.Features{EnableConsumableCapacity: true})
	newExpressions := environment.NewExpressions
	compiled := compiler.CompileCELExpression(expression, dracel.Options{EnvType: &newExpressions})
	if compiled.Error != nil {
		return Selector{}, fmt.Errorf("compile %q: %w", expression, compiled.Error)
	}
	return Selector{expression: expression, compiled: compiled}, nil
}

// WithEntry returns the selector of a field of the configuration, for its errors.
func (s Selector) WithEntry(field string) Selector {
	s.entry = field
	return s
}

// SelectsDevice reports whether the expression is true for the device. Reading an attribute that
// the device does not have is an error. Errors are of type [*ExpressionError].
func (s Selector) SelectsDevice(d discovery.Device) (bool, error) {
	selected, _, err := s.compiled.DeviceMatches(context.Background(), dracel.Device{
		Driver:                   discovery.Domain,
		AllowMultipleAllocations: &d.Shareable,
		Attributes:               d.Attributes.ForSlice(),
		Capacity:                 d.Capacity,
	})
	if err != nil {
		return false, &ExpressionError{Entry: s.entry, Expression: s.expression, Device: d.Name, Err: err}
	}
	return selected, nil
}

// NewSelection returns a setting for the devices that a selector selects.
func NewSelection[T any](s Selector, value T) discovery.Selection[T] {
	return discovery.Selection[T]{Expression: s.expression, Selects: s.SelectsDevice, Value: value}
}

// ApplyTo returns the devices with the rules applied: without excluded devices, and with shares,
// extended resources and modes. Offers without a name, OptIn devices without a configured name and
// PoolOnly devices outside of pools are left out. If an expression fails for a device, the device
// is not selected and the error is reported as a problem.
//
// All devices of a physical device must be offered by one API. If the rules choose several APIs,
// none of the devices is offered, and problems name them. A resource name that some devices of a
// family offer themselves is not given to the family's other devices: the name of neuron cores is
// not for whole chips. A device from configured paths is not offered if another family offers one
// of its nodes. Configured units without a device on the host are not offered if another family
// offers devices of the same kind. The administrator can exclude the other devices. If a unit has
// lost one of its Members, the other members are not offered. If the devices of a resource must be
// alike and differ, the resource has no devices.
//
// If the host has only nodes for virtual machines, such as /dev/kvm, the device plugin API offers those
// in mode Auto.
func (r *Rules) ApplyTo(s *discovery.Snapshot) *Snapshot {
	out := &Snapshot{Problems: slices.Clone(s.Problems), Gone: s.Gone, Allocation: r.Allocation, Attributes: r.Attributes}
	own, lists := ownNames(s), make(map[string]*counted)
	devices := r.joinWanted(s.Devices, own)
	for i := range devices {
		d := offeredAs(&devices[i])
		kept, errs := r.applyDevice(&d, own[d.Family], lists)
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
	out.withholdAccessories()
	return out
}

// NoAccelerators is the ModeReason of [Rules.ApplyTo] on a host without accelerators.
const NoAccelerators = "not published by DRA, because the mode is Auto and the host has no accelerators"

// withholdAccessories keeps the nodes for virtual machines, such as /dev/kvm, from DRA if the host has no
// other devices and the configuration does not choose their API. Otherwise, each host of a cluster would
// cost the scheduler memory and time, although most pods request these nodes together with an
// accelerator, or by the device plugin API.
func (s *Snapshot) withholdAccessories() {
	if slices.ContainsFunc(s.Devices, func(d Offered) bool { return d.Attributes.String("kind") != "virtualization" }) {
		return
	}
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Mode == discovery.ModeAuto {
			d.Mode, d.ModeReason = discovery.ModeDevicePlugin, NoAccelerators
		}
	}
}

// joinWanted joins the functions of each IOMMU group if a resource wants one of them under vfio.
func (r *Rules) joinWanted(devices []discovery.Device, own map[string]map[string]bool) []discovery.Device {
	if !slices.ContainsFunc(r.Resources, func(resource Resource) bool { return resource.Want[discovery.Driver] != "" }) {
		return devices
	}
	return discovery.JoinGroups(devices, func(device *discovery.Device) bool {
		d := offeredAs(device)
		selects := func(s Selector) bool {
			selected, err := s.SelectsDevice(*device)
			return selected && err == nil // name reports the error later
		}
		_, _ = r.name(&d, selects, own[d.Family], nil)
		return d.Want[discovery.Driver] != ""
	})
}

// offeredAs returns a device as offered without rules. If the family sets a number of shares, the
// device is shared by number.
func offeredAs(d *discovery.Device) Offered {
	offered := Offered{Device: *d, Offers: d.PluginOffers}
	if _, counted := d.Capacity[discovery.Shares]; counted {
		offered.Sharing = byNumber()
	}
	return offered
}

// ownNames returns the extended resources that the families' devices offer themselves, in any mode
// of their plugins, by family.
func ownNames(s *discovery.Snapshot) map[string]map[string]bool {
	names := make(map[string]map[string]bool)
	for i := range s.Devices {
		d := &s.Devices[i]
		if names[d.Family] == nil {
			names[d.Family] = make(map[string]bool)
		}
		for _, offer := range d.PluginOffers {
			names[d.Family][offer.Resource] = true
		}
	}
	return names
}

// applyDevice applies the rules to the device and reports whether the device is kept. The device's
// maps and slices belong to the host's snapshot and must not be modified. own contains the family's
// own resource names. applyDevice adds the device's units to lists, the resources that count units.
func (r *Rules) applyDevice(d *Offered, own map[string]bool, lists map[string]*counted) (kept bool, errs []error) {
	if d.OptIn && !slices.ContainsFunc(r.Resources, func(resource Resource) bool { return d.hasOffer(resource.Name) }) {
		return false, nil // the device is not configured, so errors are not reported
	}
	selects := func(s Selector) bool {
		selected, err := s.SelectsDevice(d.Device)
		if err != nil {
			errs = append(errs, err)
		}
		return selected
	}
	form, fixed := r.Forms[d.Name]
	if !fixed && slices.ContainsFunc(r.Exclude, selects) {
		return false, errs
	}
	d.Overhead = r.hostOverhead(selects)
	share := form.shareFor(d)
	if !fixed {
		share = r.shareOf(selects)
	}
	if d.PoolOnly == discovery.SharedPools && (share == nil || !share.Pool) {
		return false, nil // the device is not configured, so errors are not reported
	}
	kept, err := r.name(d, selects, own, share)
	if !kept && d.PoolOnly != "" {
		return false, nil // the device is not configured, so errors are not reported
	}
	if err != nil {
		errs = append(errs, err)
	}
	if share != nil {
		if err := share.shareDevice(d, lists); err != nil {
			errs = append(errs, err)
		}
	}
	if err := d.publishNames(); err != nil {
		errs = append(errs, err)
	}
	return kept, errs
}

// publishNames sets the attributes with the names under which the device is offered.
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

// name sets the mode and the extended resources of the device, and reports whether the device is
// offered at all. A device with named shares needs no other name.
func (r *Rules) name(d *Offered, selects func(Selector) bool, own map[string]bool, share *Share) (kept bool, err error) {
	d.Mode = r.Mode
	i := slices.IndexFunc(r.Resources, func(resource Resource) bool {
		return (d.hasOffer(resource.Name) || !d.OptIn && !own[resource.Name]) && (d.PoolOnly != discovery.SRIOVPools || resource.SRIOV != nil) && selects(resource.Selector)
	})
	if i < 0 {
		if share == nil || share.Resource == "" {
			d.Offers = named(d.Offers)
		}
		return !d.OptIn && d.PoolOnly != discovery.SRIOVPools, nil
	}
	resource := r.Resources[i]
	if resource.Mode != nil {
		d.Mode = *resource.Mode
	}
	d.Want, d.SRIOV = resource.Want, resource.SRIOV
	d.Offers = renameOffers(d.Offers, resource.Name, resource.SRIOV != nil)
	if len(d.Offers) == 0 && d.Mode != discovery.ModeDRA {
		return true, fmt.Errorf("resource %s: the device has no ID in the device plugin API", resource.Name)
	}
	return true, nil
}

// hasOffer reports whether the device has an offer of the resource.
func (d *Offered) hasOffer(resource string) bool {
	return slices.ContainsFunc(d.Offers, func(offer discovery.Offer) bool { return offer.Resource == resource })
}

// renameOffers returns the offers under a single other name. If the device has several offers,
// renameOffers prefers the IDs of the offer with that name, then the IDs of the name's domain, then
// the IDs of the first offer. A pool of the SR-IOV network device plugin prefers the IDs for such
// pools. A device without IDs is not offered.
func renameOffers(offers []discovery.Offer, resource string, sriov bool) []discovery.Offer {
	domain, _, _ := strings.Cut(resource, "/")
	for _, fits := range []func(discovery.Offer) bool{
		func(offer discovery.Offer) bool { return offer.SRIOV && sriov },
		func(offer discovery.Offer) bool { return offer.Resource == resource },
		func(offer discovery.Offer) bool { return offer.Resource == domain+"/"+discovery.AnyName },
		func(offer discovery.Offer) bool { return !offer.IsUnnamed() || offer.Resource == discovery.AnyName },
	} {
		allowed := func(offer discovery.Offer) bool { return fits(offer) && (sriov || !offer.SRIOV) }
		if i := slices.IndexFunc(offers, allowed); i >= 0 {
			offer := offers[i]
			offer.Resource, offer.Optional, offer.SRIOV = resource, false, false
			return []discovery.Offer{offer}
		}
	}
	return nil
}

// named returns the offers that have a name and need no configuration.
func named(offers []discovery.Offer) []discovery.Offer {
	unasked := func(offer discovery.Offer) bool { return offer.IsUnnamed() || offer.Optional }
	if !slices.ContainsFunc(offers, unasked) {
		return offers
	}
	return slices.DeleteFunc(slices.Clone(offers), unasked)
}
