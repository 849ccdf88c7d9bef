package scan

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
)

// dropAmbiguous removes ambiguous values: an identity of different physical devices, and a device
// plugin ID of several units. No device keeps such a value, so no device is mistaken for another.
// Each case becomes a Problem. The Problem names several devices, so no device counts as
// unreadable.
func dropAmbiguous(s *discovery.Snapshot) {
	dropIdentities(s)
	dropIDs(s)
}

// among is a value with the group of devices where the value must be unique.
type among struct{ group, value string }

// dropIdentities removes ambiguous identities, with the attributes and IDs derived from them.
// Partitions of a physical device may share an identity.
func dropIdentities(s *discovery.Snapshot) {
	stating := make(map[among][]*discovery.Device)
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Identity != "" {
			key := among{d.Family, d.Identity}
			stating[key] = append(stating[key], d)
		}
	}
	maps.DeleteFunc(stating, func(_ among, devices []*discovery.Device) bool {
		return !slices.ContainsFunc(devices, func(d *discovery.Device) bool { return d.Silicon() != devices[0].Silicon() })
	})
	for _, key := range slices.SortedFunc(maps.Keys(stating), byValue) {
		for _, d := range stating[key] {
			dropIdentity(d)
		}
		addAmbiguous(s, stating[key], fmt.Errorf("identity %q is %w, so it is ignored", key.value, discovery.ErrNotUnique))
	}
}

// dropIdentity removes the identity of a device, with the attributes and IDs derived from the
// identity.
func dropIdentity(d *discovery.Device) {
	identity := d.Identity
	d.Identity, d.Attributes = "", maps.Clone(d.Attributes)
	for _, name := range []resourceapi.QualifiedName{"uuid", "serial"} {
		if value := d.Attributes.String(name); value == identity || value != "" && strings.HasPrefix(identity, value+"/") {
			delete(d.Attributes, name)
		}
	}
	keepIDs(d, func(_ discovery.Offer, id string) bool { return id != identity })
}

// keepIDs removes the device plugin IDs rejected by keep, and offers without a remaining ID.
func keepIDs(d *discovery.Device, keep func(discovery.Offer, string) bool) {
	var offers []discovery.Offer
	for _, offer := range d.PluginOffers {
		all := len(offer.IDs)
		offer.IDs = slices.DeleteFunc(slices.Clone(offer.IDs), func(id string) bool { return !keep(offer, id) })
		if len(offer.IDs) > 0 || all == 0 {
			offers = append(offers, offer)
		}
	}
	d.PluginOffers = offers
}

// dropIDs removes device plugin IDs shared by several units of a resource. Offers without a
// resource name are compared within their family.
func dropIDs(s *discovery.Snapshot) {
	units := make(map[among]string)
	twice := make(map[among]bool)
	for i := range s.Devices {
		d := &s.Devices[i]
		for _, offer := range d.PluginOffers {
			unit := unitText(&offer, d)
			for _, id := range offer.IDs {
				key := among{idGroup(&offer, d), id}
				if first, known := units[key]; known && first != unit {
					twice[key] = true
				}
				units[key] = unit
			}
		}
	}
	if len(twice) == 0 {
		return
	}
	standing := make(map[among][]*discovery.Device)
	for i := range s.Devices {
		d := &s.Devices[i]
		keepIDs(d, func(offer discovery.Offer, id string) bool {
			key := among{idGroup(&offer, d), id}
			if twice[key] && !slices.Contains(standing[key], d) {
				standing[key] = append(standing[key], d)
			}
			return !twice[key]
		})
	}
	for _, key := range slices.SortedFunc(maps.Keys(standing), byValue) {
		addAmbiguous(s, standing[key], fmt.Errorf("ID %q of %s is %w, so the device plugin API does not offer it", key.value, key.group, discovery.ErrNotUnique))
	}
}

// idGroup names the group where the IDs of an offer must be unique.
func idGroup(o *discovery.Offer, d *discovery.Device) string {
	if o.IsUnnamed() {
		return "family " + d.Family
	}
	return o.Resource
}

// unitText names the unit behind the IDs of a device's offer.
func unitText(o *discovery.Offer, d *discovery.Device) string {
	if o.Unit == "" {
		return "device " + d.Name
	}
	return "unit " + o.Unit
}

// addAmbiguous adds a Problem with the names of all devices with the same value.
func addAmbiguous(s *discovery.Snapshot, devices []*discovery.Device, what error) {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.Name
	}
	s.Problems = append(s.Problems, discovery.Problem{Device: strings.Join(names, " and "), Err: what})
}

func byValue(a, b among) int {
	return cmp.Or(strings.Compare(a.group, b.group), strings.Compare(a.value, b.value))
}
