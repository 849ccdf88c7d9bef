package list

import (
	"fmt"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// fitUnits omits the last units of a resource if its list would be too long.
func fitUnits(resource string, units []*Unit) ([]*Unit, []discovery.Problem) {
	size, ids, fitting := 0, 0, len(units)
	for i, u := range units {
		size += u.size()
		ids += len(u.IDs)
		if size > rules.MaxList && fitting == len(units) {
			fitting = i
		}
	}
	if fitting == len(units) {
		return units, nil
	}
	return units[:fitting], []discovery.Problem{{Device: units[fitting].Name, Err: fmt.Errorf(
		"resource %s: its list of %d IDs has %.1f MiB, and the kubelet takes %.1f: %s and those after it are left out; share by fewer replicas, or under several names",
		resource, ids, mebibytes(size), mebibytes(rules.MaxList), units[fitting].Name)}}
}

// size returns the number of bytes of the unit's IDs in the list, or slightly more.
func (u *Unit) size() int {
	size, nodes := 0, len(u.topologyInfo().GetNodes())
	for _, id := range u.IDs {
		size += rules.IDSize(len(id), nodes)
	}
	return size
}

func mebibytes(bytes int) float64 { return float64(bytes) / (1 << 20) }
