package list

import (
	"fmt"
	"slices"
	"strings"

	"chandler.dev/discovery/rules"
)

// Amount is a container's amount of a resource whose IDs are units of a capacity. All units of an
// amount must be on one device.
type Amount struct {
	Unit  *Unit
	IDs   int
	Place int // index of the unit among the units of the list, in name order
}

// Amount returns the amount of IDs of units, or nil if the IDs stand for devices. It returns an
// error if no single device has enough left. This can happen since the kubelet counts the free
// units of all devices together.
func (l *List) Amount(ids []string, units []*Unit) (*Amount, error) {
	if !slices.ContainsFunc(units, func(u *Unit) bool { return u.Counts != "" }) {
		return nil, nil
	}
	if len(units) > 1 {
		var parts []string
		for _, u := range units {
			n := 0
			for _, id := range ids {
				if l.rows[id].unit == u {
					n++
				}
			}
			parts = append(parts, fmt.Sprintf("%d of %s", n, u.Name))
		}
		return nil, fmt.Errorf("%d units of %s requested, and no device has that many left; it would be %s",
			len(ids), units[0].Counts, strings.Join(parts, " and "))
	}
	return &Amount{units[0], len(ids), slices.Index(l.distinctUnits(), units[0])}, nil
}

// All reports whether units are all units of the list.
func (l *List) All(units []*Unit) bool { return len(units) == len(l.distinctUnits()) }

// distinctUnits returns the units of the list, without duplicates, in name order.
func (l *List) distinctUnits() []*Unit {
	var units []*Unit
	seen := make(map[*Unit]bool)
	for _, r := range l.rows {
		if r.unit != nil && !r.isGone && !seen[r.unit] {
			seen[r.unit] = true
			units = append(units, r.unit)
		}
	}
	slices.SortFunc(units, byName)
	return units
}

// amountIDs returns size IDs of a capacity from one unit. If IDs must be included, amountIDs uses
// their unit. Otherwise it uses the unit with the fewest free IDs among those with enough, so that
// other units keep room for large amounts. With [rules.PolicySpread] it uses the unit with the most
// free IDs. amountIDs reports false if no unit has enough, or if the IDs stand for devices.
func (n *candidateSet) amountIDs(size int) (ids []string, enough bool) {
	if !slices.ContainsFunc(n.units, func(c *candidate) bool { return c.unit != nil && c.unit.Counts != "" }) {
		return nil, false
	}
	var best *candidate
	for _, c := range n.units {
		if c.must < n.must || len(c.free) < size {
			continue
		}
		if more := best != nil && len(c.free) > len(best.free); best == nil || len(c.free) != len(best.free) && more == (n.policy == rules.PolicySpread) {
			best = c
		}
	}
	if best == nil {
		return nil, false
	}
	return slices.Clone(best.free[:size]), true
}
