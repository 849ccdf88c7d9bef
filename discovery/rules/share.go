package rules

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// maxShares limits the shares of a device that is shared by number. Eight devices with this number
// of shares take half of [MaxList].
const maxShares = 4096

// Sharing means that containers share a device. Each container takes an amount of one of the
// device's capacities until the capacity is used up.
type Sharing struct {
	Capacity resourceapi.QualifiedName `json:"capacity"` // [discovery.Shares], "memory", …
	Unit     resource.Quantity         `json:"unit"`     // the smallest amount and the step

	// Default is the amount for a request without an amount: one share, or all of the units,
	// because a request that does not use sharing expects the whole device.
	Default resource.Quantity `json:"default"`
}

// ShareForm is how a device is divided into shares. It is zero for a device that is not divided. If
// a consumer has a share of one form, the amount left for shares of another form is unknown.
type ShareForm struct {
	Capacity resourceapi.QualifiedName `json:"capacity,omitempty"`
	Unit     string                    `json:"unit,omitempty"`   // the canonical form of a quantity
	Shares   int64                     `json:"shares,omitempty"` // the number of shares, if Capacity is [discovery.Shares]
}

// String returns a text such as "memory by 1Gi" or "shares by 1 of 4", "" for the zero form.
func (f ShareForm) String() string {
	switch {
	case f == ShareForm{}:
		return ""
	case f.Shares > 0:
		return fmt.Sprintf("%s by %s of %d", f.Capacity, f.Unit, f.Shares)
	}
	return fmt.Sprintf("%s by %s", f.Capacity, f.Unit)
}

// shareFor returns the share that gives a device the form, nil if the device has the form without
// one. After an error in the unit, which only a damaged record has, the device is not shared.
func (f ShareForm) shareFor(d *Offered) *Share {
	if f == (ShareForm{}) || d.Sharing != nil {
		return nil
	}
	if f.Shares > 0 {
		return &Share{Replicas: int(f.Shares)}
	}
	unit, err := resource.ParseQuantity(f.Unit)
	if err != nil || unit.Sign() <= 0 {
		return nil
	}
	return &Share{Capacity: f.Capacity, Unit: unit}
}

// ShareForm returns how the device is divided into shares.
func (d *Offered) ShareForm() ShareForm {
	if d.Sharing == nil {
		return ShareForm{}
	}
	return ShareForm{d.Sharing.Capacity, d.Sharing.Unit.String(), d.Shares()}
}

// Shares returns the number of shares of the device, 0 if the device is not shared by number.
func (d *Offered) Shares() int64 {
	if d.Sharing == nil || d.Sharing.Capacity != discovery.Shares {
		return 0
	}
	shares := d.Capacity[discovery.Shares].Value
	return shares.Value()
}

// byNumber returns sharing by number, with one share by default.
func byNumber() *Sharing {
	one := *resource.NewQuantity(1, resource.DecimalSI)
	return &Sharing{discovery.Shares, one, one}
}

// Share shares the selected devices: by number, if Replicas is set, or by units of a capacity.
type Share struct {
	Selector

	// Resource is the extended resource of the shares. If it is empty, shares by number are offered
	// under the names of the devices.
	Resource string

	// Replicas is the number of containers that may share a device.
	Replicas int

	// Pool means that a container gets all selected devices, and that Replicas is the number of
	// shares of the whole pool, as in Mellanox's shared RDMA plugin. DRA has no pools: a claim
	// requests the number of devices.
	Pool bool

	// Capacity is the capacity that is shared in units of Unit.
	Capacity resourceapi.QualifiedName
	Unit     resource.Quantity
}

// shareDevice shares the device. The device's maps and slices belong to the original and must not
// be modified. After an error the device remains whole and has no ID in the device plugin API. If
// the list of the resource has no room for the units, the device is shared but has no ID. For a
// device with unlimited sharing, only the number of IDs changes.
func (s *Share) shareDevice(d *Offered, lists map[string]*counted) error {
	sharing, offers, err := s.sharingOf(d, lists)
	if err == nil && sharing != nil && s.Replicas > 0 {
		d.Capacity, err = withShares(&d.Device, s.Replicas)
	}
	if err != nil {
		d.Offers = nil
		return err
	}
	d.Sharing, d.Offers = sharing, offers
	if sharing != nil {
		d.Edits, d.SharedEdits = discovery.Join(d.Edits, d.SharedEdits), specs.ContainerEdits{}
	}
	return nil
}

// sharingOf returns the sharing of the device, nil for unlimited sharing, and the resulting offers.
func (s *Share) sharingOf(d *Offered, lists map[string]*counted) (*Sharing, []discovery.Offer, error) {
	switch {
	case d.Shareable:
		offers, err := s.recountOffers(d.Offers)
		return nil, offers, err
	case d.Sharing != nil:
		return nil, nil, errors.New("sharing: several containers may have the device already")
	}
	offers := d.Offers
	if s.Resource != "" {
		offers = renameOffers(offers, s.Resource, false)
	}
	if s.Replicas > 0 {
		offers, err := s.offerReplicas(offers)
		return byNumber(), offers, err
	}
	units, err := s.countUnits(&d.Device)
	if err != nil {
		return nil, nil, fmt.Errorf("sharing: %w", err)
	}
	all := s.Unit.DeepCopy()
	all.Mul(units)
	offers, err = s.inUnits(d, offers, units, lists)
	return &Sharing{s.Capacity, s.Unit, all}, offers, err
}

// recountOffers returns the offers of a device with unlimited sharing, with the configured number
// of IDs.
func (s *Share) recountOffers(offers []discovery.Offer) ([]discovery.Offer, error) {
	fixed := func(offer discovery.Offer) bool { return offer.Stem == "" }
	if s.Replicas == 0 || s.Pool || slices.ContainsFunc(offers, fixed) {
		return nil, errors.New("sharing: any number of containers may have the device already")
	}
	if s.Resource != "" {
		offers = renameOffers(offers, s.Resource, false)
	}
	return s.offerReplicas(offers)
}

// offerReplicas returns the offers with a number of shares for each ID.
func (s *Share) offerReplicas(offers []discovery.Offer) ([]discovery.Offer, error) {
	var shared []discovery.Offer
	for _, offer := range offers {
		var ids []string
		switch dialect := cmp.Or(offer.Dialect, discovery.Replicas); {
		case s.Pool:
			offer.Unit, offer.Members, offer.Pool = offer.Resource, 0, true
			ids = discovery.CountedIDs("", s.Replicas)
		case dialect.Stem != "":
			ids = discovery.CountedIDs(dialect.Stem, s.Replicas)
		default:
			for _, id := range offer.IDs {
				ids = append(ids, discovery.CountedIDs(dialect.Before(id), s.Replicas)...)
			}
		}
		offer.IDs = ids
		if len(offer.IDs) > maxShares {
			return nil, fmt.Errorf("sharing: %d shares as %s, at most %d", len(offer.IDs), offer.Resource, maxShares)
		}
		shared = append(shared, offer)
	}
	return shared, nil
}

// countUnits returns the number of units of the capacity.
func (s *Share) countUnits(d *discovery.Device) (int64, error) {
	capacity, known := d.Capacity[s.Capacity]
	if !known {
		return 0, fmt.Errorf("how much %s the device has is not known", s.Capacity)
	}
	units := capacity.Value.Value() / s.Unit.Value()
	if units == 0 {
		return 0, fmt.Errorf("the device has %s of %s, which is less than a unit of %s", capacity.Value.String(), s.Capacity, s.Unit.String())
	}
	return units, nil
}

// inUnits returns the offers with an ID for each unit, as long as the list of the resource has
// room. A device that already has several IDs cannot be divided into units.
func (s *Share) inUnits(d *Offered, offers []discovery.Offer, units int64, lists map[string]*counted) ([]discovery.Offer, error) {
	var inUnits []discovery.Offer
	for _, offer := range offers {
		if len(offer.IDs) != 1 {
			return nil, fmt.Errorf("sharing: the device has %d IDs as %s", len(offer.IDs), offer.Resource)
		}
		if lists[offer.Resource] == nil {
			lists[offer.Resource] = &counted{unit: s.Unit}
		}
		amount, before := d.Capacity[s.Capacity].Value, discovery.Units.Before(offer.IDs[0])
		fits := lists[offer.Resource].add(countedDevice{
			name: d.Name, amount: amount.Value(), stem: len(before), inDRA: d.Mode == discovery.ModeDRA,
		}, units)
		offer.IDs, offer.Counts = nil, s.Capacity
		if fits {
			offer.IDs = discovery.CountedIDs(before, int(units))
		}
		inUnits = append(inUnits, offer)
	}
	return inUnits, nil
}

// withShares returns the device's capacity with a number of shares added.
func withShares(d *discovery.Device, n int) (discovery.Capacity, error) {
	if len(d.Attributes)+len(d.Capacity) >= resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		return nil, fmt.Errorf("sharing: no room for the capacity %s beside %d attributes and capacities", discovery.Shares, len(d.Attributes)+len(d.Capacity))
	}
	capacity := maps.Clone(d.Capacity)
	if capacity == nil {
		capacity = make(discovery.Capacity)
	}
	capacity.Set(discovery.Shares, int64(n))
	return capacity, nil
}

// shareOf returns the first share that selects the device, nil if none does.
func (r *Rules) shareOf(selects func(Selector) bool) *Share {
	if i := slices.IndexFunc(r.Sharing, func(s Share) bool { return selects(s.Selector) }); i >= 0 {
		return &r.Sharing[i]
	}
	return nil
}

// numberInfix separates the name of a device from the number of a share, in slices for API servers
// without support for sharing.
const numberInfix = "-share-"

// ShareName returns the name of a numbered share of a device. All numbers of a device have the same
// number of digits, so names sort in numeric order.
func ShareName(device string, i, shares int) string {
	digits := max(2, len(strconv.Itoa(shares-1)))
	return fmt.Sprintf("%s%s%0*d", device, numberInfix, digits, i)
}

// ShareOf returns the device of a name that may belong to a numbered share.
func ShareOf(name string) (device string, share bool) {
	i := strings.LastIndex(name, numberInfix)
	if i < 0 {
		return "", false
	}
	number := name[i+len(numberInfix):]
	return name[:i], number != "" && strings.Trim(number, "0123456789") == ""
}
