package discovery

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// JoinVFIOGroups joins the devices that are used through the same IOMMU group: the devices become
// parts of one physical device, each part takes the whole physical device, and all form one unit of
// the device plugin API. A process that opens the group can use all functions of the group,
// regardless of the families of the functions (Documentation/driver-api/vfio.rst). The unit uses
// the IDs of its first device. A device that is alone in its group stays as it is.
func JoinVFIOGroups(devices []Device) {
	joinMembers(devices, func(string) bool { return true }, vfioGroups)
}

// JoinGroups returns the devices, with the devices of an IOMMU group joined as one unit if one of
// the group is wanted under vfio. Otherwise, functions that support VFIO passthrough stay separate
// devices: each has a driver that uses the function alone.
func JoinGroups(devices []Device, wanted func(*Device) bool) []Device {
	groups := make(map[string]bool)
	for i := range devices {
		if d := &devices[i]; passthroughGroup(d) != "" && wanted(d) {
			groups[passthroughGroup(d)] = true
		}
	}
	if len(groups) == 0 {
		return devices
	}
	devices = slices.Clone(devices)
	joinMembers(devices, func(group string) bool { return groups[group] }, func(d *Device) []string {
		if group := passthroughGroup(d); group != "" {
			return []string{group}
		}
		return vfioGroups(d)
	})
	return devices
}

// joinMembers joins the devices of groups. A device with several groups joins the devices of all
// its groups. The unit is named after the first group.
func joinMembers(devices []Device, joined func(group string) bool, groupsOf func(*Device) []string) {
	unit := make(map[string]string) // the first of the joined groups, by group
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

// passthroughGroup returns the IOMMU group number of a device that supports VFIO passthrough, and
// "" for other devices.
func passthroughGroup(d *Device) string {
	if group := d.Attributes["iommuGroup"].IntValue; group != nil && d.Passthrough != nil && d.Passthrough.Why == "" {
		return strconv.FormatInt(*group, 10)
	}
	return ""
}

// vfioGroups returns the numbers of the IOMMU groups through which a device is used. The device
// nodes contain the numbers: "/dev/vfio/42" is the node of a group, and "/dev/vfio/noiommu-0" the
// node of a group without an IOMMU. The node of a function, "/dev/vfio/devices/vfio0", counts as
// the function's group, because the kernel gives a group to one user at a time through this node
// too (iommu_device_claim_dma_owner in drivers/iommu/iommu.c). A device that is available only
// under vfio belongs to its group even before the passthrough.
func vfioGroups(d *Device) (groups []string) {
	if group := passthroughGroup(d); group != "" && d.Passthrough.Only {
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

// GroupCounter is the counter of an IOMMU group. Each function of the group takes the whole
// counter.
const GroupCounter = "group"

// join joins devices, which are sorted by name, to one unit with the given name.
func join(unit string, devices []*Device) {
	all := map[string]resource.Quantity{GroupCounter: resource.MustParse("1")}
	type names struct { // each with a separate list of IDs
		resource string
		sriov    bool
	}
	ids := make(map[names][]string)
	for _, d := range devices {
		d.PartOf, d.Takes = &Silicon{Name: unit, Counters: all}, all
		offers := make([]Offer, len(d.PluginOffers))
		for i, offer := range d.PluginOffers {
			of := names{offer.Resource, offer.SRIOV}
			if ids[of] == nil {
				ids[of] = offer.IDs
			}
			offer.IDs, offer.Unit, offer.Members = ids[of], unit, 0
			offers[i] = offer
		}
		if d.PluginOffers != nil {
			d.PluginOffers = offers
		}
	}
}
