package inventory

import "chandler.dev/discovery"

// setHoldings sets how much of each device is allocated, from its consumers and the counters of its
// physical device.
func setHoldings(devices []*Device) {
	left := countersLeft(devices)
	wholes, parts := make(map[string]bool), make(map[string]bool) // physical devices with allocations
	for _, d := range devices {
		if len(d.Holders) == 0 || d.Open {
			continue
		}
		if d.Offered.PartOf != nil && d.Name == d.Silicon {
			wholes[d.Silicon] = true
		} else {
			parts[d.Silicon] = true
		}
	}
	for _, d := range devices {
		d.Holding = Free
		shares, had := int(d.Offered.Shares()), d.countHolds()
		shared := d.Offered.Sharing != nil
		if shares > 0 {
			d.Shares = Shares{All: shares, Held: min(shares, had)}
		}
		part := d.Offered.PartOf != nil
		whole := part && d.Name == d.Silicon
		switch {
		case d.Open && len(d.Holders) > 0:
			d.Holding = Held
		case d.Open:
		case len(d.Holders) > 0 && shared && (shares == 0 || had < shares):
			d.Holding = Partly
		case len(d.Holders) > 0:
			d.Holding = Held
		case whole && parts[d.Silicon]:
			d.Holding = Partly
		case part && !whole && wholes[d.Silicon], part && !left.BudgetOf(&d.Offered.Device).SufficesFor(d.Offered.Takes):
			d.Holding = Taken
		}
	}
}

// countHolds returns the number of claims and device plugin IDs of the device's allocations.
// Containers that share a claim have one share.
func (d *Device) countHolds() (n int) {
	claims := make(map[string]bool)
	for i := range d.Holders {
		h := &d.Holders[i]
		if h.Claim == "" {
			n++
			continue
		}
		claims[h.Namespace+"/"+h.Claim+" "+h.Request] = true
	}
	return n + len(claims)
}

// countersLeft returns the rest of the counters of each physical device.
func countersLeft(devices []*Device) discovery.Budgets {
	left := make(discovery.Budgets)
	for _, d := range devices {
		if d.Offered.PartOf != nil && len(d.Holders) > 0 {
			left.BudgetOf(&d.Offered.Device).TakeAmounts(d.Offered.Takes)
		}
	}
	return left
}
