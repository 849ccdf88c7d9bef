package discovery

import (
	"fmt"
	"path"
)

// SharingDaemonKind is a kind of work of a vendor's program for claims, for as long as the claims have
// devices.
type SharingDaemonKind string

// The kinds of work.
const (
	SharingDaemonMPS        SharingDaemonKind = "mps"        // a daemon for simultaneous computing of programs on a GPU
	SharingDaemonTimeSlices SharingDaemonKind = "timeSlices" // how long each program computes before the next one's turn
)

// Order is the work of a family's program for a claim, for as long as the claim has its devices.
type Order struct {
	Family string
	How    map[string]string // in the family's format
}

// Orderer returns the orders for the devices of a request.
type Orderer func(given []Device, parameters Parameters) []Order

// JoinOrderers joins the Order functions of families.
func JoinOrderers(families []*Family) Orderer {
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

// JoinOrders returns the orders of all requests of a claim. A claim can have one order per family.
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

// DaemonDir returns the directory of the files of a family's program for a claim. Its path is the
// same for the agent and on the host.
func (g *Grant) DaemonDir(family string) string { return path.Join(g.SharingDir, family, g.UID) }
