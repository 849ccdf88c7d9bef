package list

import (
	"fmt"
	"slices"
	"strings"

	"chandler.dev/discovery/rules"
)

// Amount is how much a container asks for of a resource whose IDs count a
// capacity: so many units of it, which must be of one device.
type Amount struct {
	Unit  *Unit
	IDs   int
	Place int // of the unit among those that the list offers, in name order
}

// Amount returns the amount that IDs of units are, nil if the IDs stand for
// devices. It is an error if no one device can give all of it, since the kubelet
// counts what is free on all devices together.
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
		return nil, fmt.Errorf("%d units of %s asked for, and no one device has that much left; it would be %s",
			len(ids), units[0].Counts, strings.Join(parts, " and "))
	}
	return &Amount{units[0], len(ids), slices.Index(l.units(), units[0])}, nil
}

// All reports whether units are all that the list offers.
func (l *List) All(units []*Unit) bool { return len(units) == len(l.units()) }

// units returns the units that the list offers, each once, in name order.
func (l *List) units() []*Unit {
	var units []*Unit
	seen := make(map[*Unit]bool)
	for _, r := range l.rows {
		if r.unit != nil && !r.gone && !seen[r.unit] {
			seen[r.unit] = true
			units = append(units, r.unit)
		}
	}
	slices.SortFunc(units, byName)
	return units
}

// amount returns size IDs of one unit of a capacity: of that which must be chosen
// from, else of the one that has the least left of those that have enough, so that
// large amounts stay together elsewhere; or the most, if amounts are to be spread. It
// reports false if no unit has enough, or if the IDs stand for devices.
func (n *neighbourhood) amount(size int) (ids []string, enough bool) {
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
