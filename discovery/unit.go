package discovery

import (
	"fmt"
	"slices"
)

// CountMembers sets the Members of all offers that name a Unit to how many of
// the devices are offered as that unit. It is for families whose units are only
// given whole, as cards of several functions are.
func CountMembers(devices []Device) {
	members := countMembers(devices)
	for i := range devices {
		for j := range devices[i].Offers {
			offer := &devices[i].Offers[j]
			if n := members[unitOf(*offer)]; offer.Unit != "" && n > 1 {
				offer.Members = n
			}
		}
	}
}

// resourceUnit is what the classic API hands out as one thing.
type resourceUnit struct{ resource, unit string }

func unitOf(offer Offer) resourceUnit { return resourceUnit{offer.Resource, offer.Unit} }

// countMembers returns how many devices are offered as each unit.
func countMembers(devices []Device) map[resourceUnit]int {
	members := make(map[resourceUnit]int)
	for _, d := range devices {
		var counted []resourceUnit
		for _, offer := range d.Offers {
			if unit := unitOf(offer); !slices.Contains(counted, unit) {
				counted = append(counted, unit)
				members[unit]++
			}
		}
	}
	return members
}

// dropPartial takes back the offers of units of which not all devices are
// offered so: what is left of a card is none.
func (s *Snapshot) dropPartial() {
	members := countMembers(s.Devices)
	for i := range s.Devices {
		d := &s.Devices[i]
		partial := func(offer Offer) bool { return members[unitOf(offer)] < offer.Members }
		for _, offer := range d.Offers {
			if partial(offer) {
				s.Problems = append(s.Problems, Problem{d.Name, fmt.Errorf("config: resource %s: %s is given with all of its %d devices, of which %d have the name", offer.Resource, offer.Unit, offer.Members, members[unitOf(offer)])})
			}
		}
		if slices.ContainsFunc(d.Offers, partial) {
			d.Offers = slices.DeleteFunc(slices.Clone(d.Offers), partial)
		}
	}
}
