package pool

import (
	"slices"

	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
)

// owned is the allocation of a device, or of a share, to a claim.
type owned struct {
	name  string // the allocated name, such as "gpu-share-07"
	hold  allocation.Hold
	owner allocation.Owner
}

// reshapedClaims returns the claims with a device in another form than the pool would publish now.
// The form changes when the administrator configures sharing differently, or when the API server
// gains or loses sharing. The scheduler cannot see how much such a claim consumes, and the driver
// would refuse further allocations. The result is indexed by device name, or by the name of the
// physical device if the device consumes counters.
func (in *input) reshapedClaims(devices []rules.Offered) map[string]string {
	who := make(map[string]string)
	for i := range devices {
		d := &devices[i]
		if len(in.owned[d.Name]) == 0 || d.Shareable {
			continue
		}
		names, shared := in.names(d)
		for _, o := range in.owned[d.Name] {
			same := slices.Contains(names, o.name) && (o.hold.Shares == 0 || o.hold.Shares == d.Shares())
			switch {
			case shared:
				same = same && isShareOf(o.hold.Amount, d)
			case o.name == d.Name:
				same = same && o.hold.Amount == nil
			}
			switch {
			case same:
			case len(d.Takes) > 0:
				who[d.Silicon()] = o.owner.String()
			default:
				who[d.Name] = o.owner.String()
			}
		}
	}
	return who
}

// isShareOf reports whether an amount is a share in the present form of the device.
func isShareOf(amount allocation.Amounts, d *rules.Offered) bool {
	for name := range amount {
		if _, has := d.Capacity[name]; !has {
			return false
		}
	}
	_, counted := amount[d.Sharing.Capacity]
	return counted
}
