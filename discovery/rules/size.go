package rules

import (
	"fmt"
	"maps"
	"slices"
	"sort"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
)

// MaxList is how many bytes of IDs a list of the device-plugin API may have. The
// kubelet takes messages up to gRPC's default of 4 MiB (pkg/kubelet/cm/devicemanager/
// plugin/v1beta1/client.go, dial, in 1.25 to 1.37), and drops the plugin that sends a
// longer one. Some room is left for IDs that are not offered any more and that
// containers have.
const MaxList = 4<<20 - 256<<10

// IDSize returns how many bytes an ID of so many takes in a list, or a few more, if
// its device is on so many NUMA nodes.
func IDSize(id, nodes int) int {
	const field = 2 // a tag and a length, or a small number
	size := field + id + field + len("Unhealthy")
	if nodes > 0 {
		size += field + nodes*2*field
	}
	return field + size + 2 // lengths of more than 127 have two bytes
}

// counted is the devices that one resource counts out in units of a capacity.
type counted struct {
	bytes   float64 // of the list
	unit    resource.Quantity
	devices []countedDevice
}

type countedDevice struct {
	name   string
	amount int64 // of the capacity
	stem   int   // length of an ID without its number
	inDRA  bool  // its mode is DRA, which needs no list
	long   bool  // it has no IDs, since the list would be too long
}

// bytes returns how many bytes of a list so many units of the device take, or a few
// more.
func (d countedDevice) bytes(units int64) float64 {
	return float64(units) * float64(IDSize(d.stem+len(strconv.FormatInt(units, 10)), 1))
}

// add counts a device out, and reports whether the list still has room for so many
// units.
func (c *counted) add(d countedDevice, units int64) bool {
	d.long = c.bytes+d.bytes(units) > MaxList
	if !d.long {
		c.bytes += d.bytes(units)
	}
	c.devices = append(c.devices, d)
	return !d.long
}

// bytesIn returns how long a list of all devices in units of so many of the unit
// would be.
func (c *counted) bytesIn(units int64) (bytes float64) {
	for _, d := range c.devices {
		bytes += d.bytes(d.amount / c.unit.Value() / units)
	}
	return bytes
}

// smallest returns the smallest multiple of the unit with which the list has room for
// all devices.
func (c *counted) smallest() *resource.Quantity {
	most := int(c.bytesIn(1)/MaxList) + 1 // which is enough, since units are rounded down
	times := 1 + sort.Search(most, func(i int) bool { return c.bytesIn(int64(i)+1) <= MaxList })
	unit := c.unit.DeepCopy()
	unit.Mul(int64(times))
	return &unit
}

// reportLong says which devices have no IDs since lists would be too long.
func (s *Snapshot) reportLong(lists map[string]*counted) {
	for _, name := range slices.Sorted(maps.Keys(lists)) {
		c := lists[name]
		var long []string
		for _, d := range c.devices {
			if d.long && !d.inDRA {
				long = append(long, d.name)
			}
		}
		if len(long) > 0 {
			s.Problems = append(s.Problems, discovery.Problem{Device: long[0], Err: fmt.Errorf(
				"config: sharing: resource %s: a list of all units of %s is %.1f MiB long, and the kubelet takes %.1f: the device-plugin API does not offer %s; the smallest unit that fits is %s",
				name, c.unit.String(), c.bytesIn(1)/(1<<20), float64(MaxList)/(1<<20), strings.Join(long, ", "), c.smallest().String())})
		}
	}
}
