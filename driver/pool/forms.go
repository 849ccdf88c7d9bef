package pool

import (
	"fmt"
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

// reshapedDevices returns an error for each device that a claim has in another form than the pool
// would publish now. The form changes when the administrator configures sharing differently, or when
// the API server gains or loses sharing. The scheduler cannot see how much such a claim consumes, and
// the driver would refuse further allocations. The result is indexed by device name, or by the name
// of the physical device if the device consumes counters.
func (b *builder) reshapedDevices(devices []rules.Offered) map[string]error {
	reshaped := make(map[string]error)
	for i := range devices {
		d := &devices[i]
		if len(b.owned[d.Name]) == 0 || d.Shareable {
			continue
		}
		names, shared := b.names(d)
		for _, o := range b.owned[d.Name] {
			same := slices.Contains(names, o.name) && (o.hold.Shares == 0 || o.hold.Shares == d.Shares())
			switch {
			case shared:
				same = same && isShareOf(o.hold.Amount, d)
			case o.name == d.Name:
				same = same && o.hold.Amount == nil
			}
			if same {
				continue
			}
			name := d.Name
			if len(d.Takes) > 0 {
				name = d.Silicon()
			}
			reshaped[name] = fmt.Errorf("%s has it, or a part of its silicon, in another form; it is left out until that ends", o.owner)
		}
	}
	return reshaped
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
