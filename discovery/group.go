package discovery

import (
	"path"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// joinGroups makes devices that are used through one IOMMU group parts of one
// Whole, of which each takes all, and one unit of the classic API: whoever opens
// the group has all of its functions, whichever families hand them out
// (Documentation/driver-api/vfio.rst). The unit is known by the IDs of its first
// device. A device that is alone in its group stays as it is.
func (s *Snapshot) joinGroups() {
	members := make(map[string][]*Device) // by the group's node
	for i := range s.Devices {
		d := &s.Devices[i]
		for _, node := range d.Edits.DeviceNodes {
			if isGroupNode(node.HostPath) {
				members[node.HostPath] = append(members[node.HostPath], d)
			}
		}
	}
	for node, devices := range members {
		if len(devices) > 1 {
			join("iommu-group-"+path.Base(node), devices)
		}
	}
}

// isGroupNode reports whether a device node is that of an IOMMU group:
// "/dev/vfio/42", or "/dev/vfio/noiommu-0" where there is no IOMMU.
func isGroupNode(name string) bool {
	number := strings.TrimPrefix(path.Base(name), "noiommu-")
	_, err := strconv.ParseUint(number, 10, 32)
	return path.Dir(name) == "/dev/vfio" && err == nil
}

// join makes devices, which are in name order, one unit of that name.
func join(unit string, devices []*Device) {
	all := map[string]resource.Quantity{"group": resource.MustParse("1")}
	type name struct{ resource, within string }
	ids := make(map[name][]string)
	for _, d := range devices {
		d.PartOf, d.Takes = &Whole{Name: unit, Counters: all}, all
		offers := make([]Offer, len(d.Offers))
		for i, offer := range d.Offers {
			key := name{offer.Resource, offer.Within}
			if ids[key] == nil {
				ids[key] = offer.IDs
			}
			offer.IDs, offer.Unit, offer.Members = ids[key], unit, 0
			offers[i] = offer
		}
		if d.Offers != nil {
			d.Offers = offers
		}
	}
}
