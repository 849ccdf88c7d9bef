package discovery

// CountMembers sets the Members of all offers with a Unit to the number of devices in that unit.
// CountMembers is for families whose units are allocated only as a whole, such as cards with
// several functions.
func CountMembers(devices []Device) {
	offers := make([][]Offer, len(devices))
	for i := range devices {
		offers[i] = devices[i].PluginOffers
	}
	members := MemberCounter(offers)
	for _, of := range offers {
		for i := range of {
			if n := members(of[i]); of[i].Unit != "" && n > 1 {
				of[i].Members = n
			}
		}
	}
}

// MemberCounter returns a function that counts the devices in the unit of an offer. offers are the
// offers of each device.
func MemberCounter(offers [][]Offer) func(Offer) int {
	type unit struct{ resource, name string }
	members := make(map[unit]int)
	for _, of := range offers {
		counted := make(map[unit]bool)
		for _, offer := range of {
			if u := (unit{offer.Resource, offer.Unit}); !counted[u] {
				counted[u] = true
				members[u]++
			}
		}
	}
	return func(offer Offer) int { return members[unit{offer.Resource, offer.Unit}] }
}
