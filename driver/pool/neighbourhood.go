package pool

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"

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

// describe adds the requested attributes of a device that concern other devices: the aligned groups,
// each named by its first member, and the nearest network adapter.
func (n *neighbourhood) describe(device string, requested []resourceapi.QualifiedName, attributes discovery.Attributes) {
	add := func(name resourceapi.QualifiedName, value string) {
		if slices.Contains(requested, name) {
			attributes.SetString(name, value)
		}
	}
	for _, g := range n.groups[device] {
		add(topology.GroupAttribute(len(g)), g[0])
	}
	add(topology.NearestAdapter, n.adapters[device])
}
