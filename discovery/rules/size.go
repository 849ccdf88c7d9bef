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

// MaxList is the maximum size in bytes of the IDs in a list of the device plugin API. The kubelet
// accepts messages up to gRPC's default of 4 MiB (pkg/kubelet/cm/devicemanager/
// plugin/v1beta1/client.go, dial, in 1.25 to 1.37), and drops a plugin that sends a longer message.
// The difference leaves room for IDs that are no longer offered but still allocated.
const MaxList = 4<<20 - 256<<10

// IDSize returns the size in bytes of a list entry for an ID of the given length, whose device is
// on the given number of NUMA nodes. The result may be slightly too high.
func IDSize(id, nodes int) int {
	const field = 2 // a tag and a length, or a small number
	size := field + id + field + len("Unhealthy")
	if nodes > 0 {
		size += field + nodes*2*field
	}
	return field + size + 2 // lengths above 127 have two bytes
}

// counted contains the devices that one resource divides into units of a capacity.
type counted struct {
	bytes   float64 // of the list
	unit    resource.Quantity
	devices []countedDevice
}

type countedDevice struct {
	name   string
	amount int64 // of the capacity
	stem   int   // length of an ID without its number
	inDRA  bool  // the mode is DRA, which needs no list
	long   bool  // the device has no IDs, because the list would be too long
}

// bytes returns the size in bytes of the list entries for the given number of units of the device.
// The result may be slightly too high.
func (d countedDevice) bytes(units int64) float64 {
	return float64(units) * float64(IDSize(d.stem+len(strconv.FormatInt(units, 10)), 1))
}

// add adds a device, and reports whether the list has room for the device's units.
func (c *counted) add(d countedDevice, units int64) bool {
	d.long = c.bytes+d.bytes(units) > MaxList
	if !d.long {
		c.bytes += d.bytes(units)
	}
	c.devices = append(c.devices, d)
	return !d.long
}

// bytesIn returns the size of a list of all devices, divided into units of the given multiple of
// the unit.
func (c *counted) bytesIn(units int64) (bytes float64) {
	for _, d := range c.devices {
		bytes += d.bytes(d.amount / c.unit.Value() / units)
	}
	return bytes
}

// smallestUnit returns the smallest multiple of the unit for which all devices fit into the list.
func (c *counted) smallestUnit() *resource.Quantity {
	most := int(c.bytesIn(1)/MaxList) + 1 // large enough, because numbers of units are rounded down
	times := 1 + sort.Search(most, func(i int) bool { return c.bytesIn(int64(i)+1) <= MaxList })
	unit := c.unit.DeepCopy()
	unit.Mul(int64(times))
	return &unit
}

// reportLong reports the devices without IDs whose lists would be too long.
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
				name, c.unit.String(), c.bytesIn(1)/(1<<20), float64(MaxList)/(1<<20), strings.Join(long, ", "), c.smallestUnit().String())})
		}
	}
}
