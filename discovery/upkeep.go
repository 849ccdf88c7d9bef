package discovery

import (
	"errors"
	"fmt"
	"path"
)

// Upkeep is what the administrator lets a vendor's own program do for claims for as long as they
// have devices, such as to run a daemon for them.
type Upkeep struct {
	Kind       UpkeepKind
	Expression string // as the administrator wrote it
	Selects    func(Device) (bool, error)
}

// UpkeepKind is a kind of what is done.
type UpkeepKind string

// The kinds.
const (
	UpkeepMPS        UpkeepKind = "mps"        // a daemon by which programs compute on a GPU at the same time
	UpkeepTimeSlices UpkeepKind = "timeSlices" // how long each program computes before the next has its turn
)

// SameUpkeep reports whether two entries say the same.
func SameUpkeep(a, b Upkeep) bool { return a.Kind == b.Kind && a.Expression == b.Expression }

// Keeps reports whether the administrator allows a kind for a device. The error is of
// expressions that cannot be evaluated for it.
func (h *Host) Keeps(d Device, kind UpkeepKind) (bool, error) {
	var errs []error
	for _, upkeep := range h.Upkeep {
		if upkeep.Kind != kind {
			continue
		}
		selected, err := upkeep.Selects(d)
		if err != nil {
			errs = append(errs, err)
		}
		if selected {
			return true, nil
		}
	}
	return false, errors.Join(errs...)
}

// Order is what a family's program is to do for a claim for as long as that has its devices.
type Order struct {
	Family string
	How    map[string]string // in the family's words
}

// Orderer returns the orders for the devices of a request.
type Orderer func(given []Device, parameters Parameters) []Order

// Orderers joins the Orders of families.
func Orderers(families []*Family) Orderer {
	return func(given []Device, parameters Parameters) (orders []Order) {
		for _, f := range families {
			if f.Order == nil || len(parameters) == 0 {
				continue
			}
			var own []Device
			for _, d := range given {
				if d.Family == f.Name {
					own = append(own, d)
				}
			}
			if how := f.Order(own, parameters); how != nil {
				orders = append(orders, Order{f.Name, how})
			}
		}
		return orders
	}
}

// JoinOrders returns the orders of all requests of a claim. A family has one for each claim.
func JoinOrders(all ...[]Order) (joined []Order, err error) {
	seen := make(map[string]bool)
	for _, orders := range all {
		for _, order := range orders {
			if seen[order.Family] {
				return nil, fmt.Errorf("two requests ask %s's program for something; one may, for as many devices as it likes", order.Family)
			}
			seen[order.Family] = true
			joined = append(joined, order)
		}
	}
	return joined, nil
}

// UpkeepDir returns the directory in which a family's program has what goes with a claim. It has
// the same path for the agent and on the host.
func (g *Grant) UpkeepDir(family string) string { return path.Join(g.Upkeep, family, g.UID) }
