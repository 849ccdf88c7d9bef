package pool

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/topology"
)

// deviceOrder contains the positions of all devices relative to each other.
type deviceOrder struct {
	main     map[string]bool // physical devices with a device whose kind belongs to the main pool
	places   map[string]int  // of physical devices, from 1, in topology order
	groups   topology.Groups
	adapters map[string]string // nearest adapters
}

func newDeviceOrder(devices []discovery.Device) *deviceOrder {
	n := &deviceOrder{
		main: make(map[string]bool), places: make(map[string]int),
		groups: topology.AlignedGroups(devices), adapters: topology.NearestAdapters(devices),
	}
	for i := range devices {
		if devices[i].InMainPool() {
			n.main[devices[i].Silicon()] = true
		}
	}
	for i, silicon := range topology.OrderSilicon(devices, n.groups) {
		n.places[silicon] = i + 1
	}
	return n
}

// describe adds the requested attributes of a device that concern other devices: the aligned groups,
// each named by its first member, and the nearest network adapter.
func (n *deviceOrder) describe(device string, requested []resourceapi.QualifiedName, attributes discovery.Attributes) {
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
