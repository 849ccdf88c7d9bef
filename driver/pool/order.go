package pool

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/topology"
)

// deviceOrder contains the positions of all devices relative to each other.
type deviceOrder struct {
	places   map[string]int // of physical devices, from 1: GPUs and NPUs first, and otherwise in topology order
	groups   topology.Groups
	adapters map[string]string // nearest adapters
}

func newDeviceOrder(devices []discovery.Device) *deviceOrder {
	n := &deviceOrder{places: make(map[string]int), groups: topology.AlignedGroups(devices), adapters: topology.NearestAdapters(devices)}
	rank := make(map[string]int) // of physical devices, 0 if absent
	for i := range devices {
		if slices.Contains(kindsFirst, devices[i].Attributes.String("kind")) {
			rank[devices[i].Silicon()] = -1
		}
	}
	order := topology.OrderSilicon(devices, n.groups)
	slices.SortStableFunc(order, func(a, b string) int { return cmp.Compare(rank[a], rank[b]) })
	for i, silicon := range order {
		n.places[silicon] = i + 1
	}
	return n
}

// kindsFirst lists the kinds of devices that precede all others in the slices. The scheduler evaluates
// a request for each free device in the order of the slices until a device matches, so network
// adapters in front of GPUs would cost time for each GPU.
var kindsFirst = []string{"gpu", "npu"}

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
