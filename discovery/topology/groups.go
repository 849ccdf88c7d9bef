package topology

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
)

// groupSizes are the sizes of aligned groups, in ascending order. Each is twice the previous one.
var groupSizes = []int{2, 4, 8}

// GroupAttribute returns the attribute that names the group of a size to which a device belongs.
func GroupAttribute(size int) resourceapi.QualifiedName {
	return resourceapi.QualifiedName("group" + strconv.Itoa(size))
}

// Group is a set of close devices of one product. Its size is 2, 4 or 8.
type Group []string

// Groups contains the aligned groups of each device by the device's name, the smallest first. A
// group of four consists of two groups of two, and a group of eight of two groups of four.
type Groups map[string][]Group

// AlignedGroups divides whole accelerators of one product into groups of two, four and eight close
// devices. The members of a group share at least a NUMA node, or are connected by private links.
// Devices that are left over, such as the third of three devices, are in no group of that size. The
// result is the same for the same devices.
func AlignedGroups(devices []discovery.Device) Groups {
	products := make(map[string][]*discovery.Device)
	for i := range devices {
		if d := &devices[i]; isAccelerator(d) {
			product := strings.Join([]string{d.Attributes.String("kind"), d.Family, d.Attributes.String("model")}, "/")
			products[product] = append(products[product], d)
		}
	}
	all := make(Groups)
	for _, same := range products {
		places := make(map[string]*Place, len(same))
		for _, d := range same {
			places[d.Name] = PlaceOf(d)
		}
		var groups []Group
		for _, name := range slices.Sorted(maps.Keys(places)) {
			groups = append(groups, Group{name})
		}
		for range groupSizes {
			groups = pairGroups(groups, places)
			for _, g := range groups {
				for _, name := range g {
					all[name] = append(all[name], g)
				}
			}
		}
	}
	return all
}

// countWith returns the number of groups that have a device as a member.
func countWith(groups []Group, device string) (count int) {
	for _, group := range groups {
		if slices.Contains(group, device) {
			count++
		}
	}
	return count
}

// isAccelerator reports whether a device is a whole accelerator that one consumer at a time has.
func isAccelerator(d *discovery.Device) bool {
	switch d.Attributes.String("kind") {
	case "gpu", "npu", "fpga":
		return !d.Shareable && d.Silicon() == d.Name
	}
	return false
}

// pairGroups joins groups of one size to groups of twice the size, the closest first. Among equally
// close groups, the one with the fewest equally close partners chooses first, so that few groups
// stay without a partner.
func pairGroups(groups []Group, places map[string]*Place) (pairs []Group) {
	left := make([]int, len(groups)) // indices of the groups without a partner
	for i := range groups {
		left[i] = i
	}
	near := make([][]int, len(groups))
	for i := range groups {
		near[i] = make([]int, len(groups))
		for j := range i {
			near[i][j] = groupNearness(groups[i], groups[j], places)
			near[j][i] = near[i][j]
		}
	}
	for {
		first, second := closestPair(left, near)
		if first < 0 {
			break
		}
		pairs = append(pairs, slices.Concat(groups[first], groups[second]))
		left = slices.DeleteFunc(left, func(i int) bool { return i == first || i == second })
	}
	return pairs
}

// closestPair returns the indices of the pair to join next, or -1 if no two groups are close.
func closestPair(left []int, near [][]int) (first, second int) {
	most := 0
	for _, i := range left {
		for _, j := range left {
			if i != j {
				most = max(most, near[i][j])
			}
		}
	}
	if most == 0 {
		return -1, -1
	}
	partners := make([]int, len(near)) // number of the equally close partners, by group
	for _, i := range left {
		for _, j := range left {
			if i != j && near[i][j] == most {
				partners[i]++
			}
		}
	}
	first, second = -1, -1
	fewest := [2]int{len(near) + 1, len(near) + 1}
	for at, i := range left {
		for _, j := range left[at+1:] {
			if near[i][j] != most {
				continue
			}
			if counts := [2]int{min(partners[i], partners[j]), max(partners[i], partners[j])}; slices.Compare(counts[:], fewest[:]) < 0 {
				first, second, fewest = i, j, counts
			}
		}
	}
	return first, second
}

// groupNearness returns the sum of the nearness of all pairs of members, or 0 if the groups are not
// close: if no private link connects them, and two members do not even share a NUMA node.
func groupNearness(a, b Group, places map[string]*Place) (sum int) {
	isLinked, isFar := false, false
	for _, one := range a {
		for _, other := range b {
			near := Nearness(places[one], places[other])
			isLinked, isFar, sum = isLinked || near >= nearLink, isFar || near == 0, sum+near
		}
	}
	if isFar && !isLinked {
		return 0
	}
	return sum
}
