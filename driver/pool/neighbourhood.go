package pool

import (
	"maps"

	"chandler.dev/discovery"
	"chandler.dev/discovery/topology"
)

// neighbourhood contains the positions of all devices relative to each other.
type neighbourhood struct {
	places   map[string]int // of physical devices in topology order, from 1
	groups   topology.Groups
	adapters map[string]string // nearest adapters
}

func newNeighbourhood(devices []discovery.Device) *neighbourhood {
	n := &neighbourhood{places: make(map[string]int), groups: topology.AlignedGroups(devices), adapters: topology.NearestAdapters(devices)}
	for i, silicon := range topology.OrderSilicon(devices, n.groups) {
		n.places[silicon] = i + 1
	}
	return n
}

// describe returns the attributes of a device with its aligned groups and its nearest network
// adapter. The value of a group is the name of its first member.
func (n *neighbourhood) describe(device string, attributes discovery.Attributes) discovery.Attributes {
	groups, adapter := n.groups[device], n.adapters[device]
	if len(groups) == 0 && adapter == "" {
		return attributes
	}
	attributes = maps.Clone(attributes)
	for _, g := range groups {
		attributes.SetString(topology.GroupAttribute(len(g)), g[0])
	}
	attributes.SetString(topology.NearestAdapter, adapter)
	return attributes
}
