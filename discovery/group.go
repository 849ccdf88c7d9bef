package discovery

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// joinGroups makes devices that are used through one IOMMU group parts of one
// piece of silicon, of which each takes all, and one unit of the classic API: a
// process that opens the group has all of its functions, whichever families hand
// them out (Documentation/driver-api/vfio.rst). The unit is known by the IDs of its first
// device. A device that is alone in its group stays as it is.
func (s *Snapshot) joinGroups() {
	joinMembers(s.Devices, func(string) bool { return true }, (*Device).vfioGroups)
}

// JoinGroups returns the devices, of which those of an IOMMU group are joined as one unit if one of them is wanted
// under vfio. Without that, functions which can be given to vfio are devices of their own: each has a driver that uses
// it alone.
func JoinGroups(devices []Device, wanted func(*Device) bool) []Device {
	groups := make(map[string]bool)
	for i := range devices {
		if d := &devices[i]; d.rebindGroup() != "" && wanted(d) {
			groups[d.rebindGroup()] = true
		}
	}
	if len(groups) == 0 {
		return devices
	}
	devices = slices.Clone(devices)
	joinMembers(devices, func(group string) bool { return groups[group] }, func(d *Device) []string {
		if group := d.rebindGroup(); group != "" {
			return []string{group}
		}
		return d.vfioGroups()
	})
	return devices
}

// joinMembers joins the devices of groups. A device that is used through several groups joins
// the devices of all of them. The unit has the name of the first group.
func joinMembers(devices []Device, joined func(group string) bool, groupsOf func(*Device) []string) {
	unit := make(map[string]string) // the first group of those that are joined, by group
	groups := make([][]string, len(devices))
	for i := range devices {
		groups[i] = slices.DeleteFunc(groupsOf(&devices[i]), func(group string) bool { return !joined(group) })
		var firsts []string
		for _, group := range groups[i] {
			unit[group] = cmp.Or(unit[group], group)
			firsts = append(firsts, unit[group])
		}
		slices.Sort(firsts)
		if firsts = slices.Compact(firsts); len(firsts) < 2 {
			continue
		}
		for group, first := range unit {
			if slices.Contains(firsts, first) {
				unit[group] = firsts[0]
			}
		}
	}
	members := make(map[string][]*Device) // by the first group
	for i := range devices {
		if len(groups[i]) > 0 {
			first := unit[groups[i][0]]
			members[first] = append(members[first], &devices[i])
		}
	}
	for first, devices := range members {
		if len(devices) > 1 {
			join("iommu-group-"+first, devices)
		}
	}
}

// rebindGroup returns the number of the IOMMU group with which a device can be given to vfio, "" if it cannot be.
func (d *Device) rebindGroup() string {
	if group := d.Attributes["iommuGroup"].IntValue; group != nil && d.Rebind != nil && d.Rebind.Why == "" {
		return strconv.FormatInt(*group, 10)
	}
	return ""
}

// vfioGroups returns the IOMMU groups that a device is used through, by their
// numbers. They are told by its nodes: that of a group, "/dev/vfio/42", or
// "/dev/vfio/noiommu-0" where there is no IOMMU; or the node of a function,
// "/dev/vfio/devices/vfio0", since the kernel gives a group to one user at a time
// by that too (iommu_device_claim_dma_owner in drivers/iommu/iommu.c). A device that can
// only be had under vfio is one of its group before it is given to vfio.
func (d *Device) vfioGroups() (groups []string) {
	if group := d.rebindGroup(); group != "" && d.Rebind.Only {
		return []string{group}
	}
	for _, node := range d.Edits.DeviceNodes {
		name := path.Base(node.HostPath)
		switch path.Dir(node.HostPath) {
		case "/dev/vfio":
			if _, err := strconv.ParseUint(strings.TrimPrefix(name, "noiommu-"), 10, 32); err == nil {
				groups = append(groups, name)
			}
		case "/dev/vfio/devices":
			if group := d.Attributes["iommuGroup"].IntValue; group != nil && len(groups) == 0 {
				groups = append(groups, strconv.FormatInt(*group, 10))
			}
		}
	}
	return groups
}

// GroupCounter is the counter of an IOMMU group, of which each of its functions takes all.
const GroupCounter = "group"

// join makes devices, which are in name order, one unit of that name.
func join(unit string, devices []*Device) {
	all := map[string]resource.Quantity{GroupCounter: resource.MustParse("1")}
	type names struct { // that have IDs of their own
		resource string
		sriov    bool
	}
	ids := make(map[names][]string)
	for _, d := range devices {
		d.PartOf, d.Takes = &Silicon{Name: unit, Counters: all}, all
		offers := make([]Offer, len(d.Classic))
		for i, offer := range d.Classic {
			of := names{offer.Resource, offer.SRIOV}
			if ids[of] == nil {
				ids[of] = offer.IDs
			}
			offer.IDs, offer.Unit, offer.Members = ids[of], unit, 0
			offers[i] = offer
		}
		if d.Classic != nil {
			d.Classic = offers
		}
	}
}
