package pool

import (
	"slices"

	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
)

// owned is what a claim has of a device.
type owned struct {
	name  string // as it was allocated, such as "gpu-share-07"
	hold  ledger.Hold
	owner ledger.Owner
}

// reshaped returns which claim has a device in another form than the device would
// be published in now, because the administrator has it shared otherwise or the API
// server has learnt to share. The scheduler does not see what such a claim takes, and
// what it gave out instead would be refused. It is by the device's name, or by that of
// its silicon if others compete for that.
func (in *input) reshaped(devices []rules.Offered) map[string]string {
	who := make(map[string]string)
	for i := range devices {
		d := &devices[i]
		if len(in.owned[d.Name]) == 0 || d.Open {
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

// isShareOf reports whether an amount is a share of the device as it is shared now.
func isShareOf(amount ledger.Amounts, d *rules.Offered) bool {
	for name := range amount {
		if _, has := d.Capacity[name]; !has {
			return false
		}
	}
	_, counted := amount[d.Sharing.Capacity]
	return counted
}
