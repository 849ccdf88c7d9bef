package exclusion

import (
	"fmt"
	"slices"
	"strings"

	"chandler.dev/internal/ledger/allocation"
)

// RenumberedNodes describes how the present nodes of devices differ from the given ones, as after
// cards were removed and found again. It returns "" if they do not differ, or if one of the devices
// is missing.
func RenumberedNodes(given []allocation.Node, devices []string, s Stock) string {
	var now, common []string
	var has []allocation.Node
	silicon := make(map[string]bool)
	for _, name := range devices {
		d, found := s.Device(name)
		if !found {
			return "" // a missing device is reported elsewhere
		}
		has, common, silicon[d.Silicon()] = append(has, NodesOf(name, s)...), append(common, d.CommonNodes...), true
	}
	for _, n := range has {
		now = append(now, n.String())
	}
	kept, other := false, ""
	for i := range given {
		n := &given[i]
		if slices.Contains(common, n.Path) {
			continue
		}
		changed := fmt.Sprintf("it was given as %s and is %s now", n, strings.Join(now, ", "))
		j := slices.IndexFunc(has, func(other allocation.Node) bool { return other.Path == n.Path })
		switch {
		case j < 0:
			if who := ownerOf(n.Path, s, silicon); who != "" {
				return fmt.Sprintf("%s; %s is device %s now", changed, n.Path, who)
			}
			other = changed
		case n.HasNumbers() && has[j].HasNumbers() && n.NumberText() != has[j].NumberText():
			return changed
		default:
			kept = true
		}
	}
	if kept || len(has) == 0 {
		return ""
	}
	return other
}

// ownerOf returns the device that has a node now, "" if there is none outside the excepted physical
// devices.
func ownerOf(path string, s Stock, except map[string]bool) string {
	for _, name := range s.Names() {
		d, _ := s.Device(name)
		if !d.Shareable && !except[d.Silicon()] && slices.ContainsFunc(NodesOf(name, s), func(n allocation.Node) bool { return n.Path == path }) {
			return name
		}
	}
	return ""
}

// NodesOf returns the present nodes of a device, without common nodes that other physical devices
// share.
func NodesOf(name string, stock Stock) (nodes []allocation.Node) {
	device, found := stock.Device(name)
	if !found {
		return nil
	}
	return allocation.NodesIn(device.OwnNodes())
}

// nodeTerms returns the terms under which a node is found: its path, and its numbers if known.
func nodeTerms(n *allocation.Node) []string {
	if n.HasNumbers() {
		return []string{n.Path, n.NumberText()}
	}
	return []string{n.Path}
}
