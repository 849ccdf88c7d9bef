package usage

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/simulation/kubelet"
	"chandler.dev/internal/simulation/machine"
)

// useOf returns the use of a part of a device by a container.
func (t *Tracker) useOf(c *kubelet.Container, d *rules.Offered, part part) *use {
	u := &use{container: c, device: d.Name, address: t.CardOf(d.Name), silicon: d.Silicon(), whole: d.PartOf == nil, open: d.Shareable, takes: d.Takes, part: part}
	if d.PartOf != nil {
		u.has = d.PartOf.Counters
	}
	return u
}

// claimUse returns the use of a CDI device for a result of a claim's allocation.
func (t *Tracker) claimUse(c *kubelet.Container, claim types.UID, device string, r *resourceapi.DeviceRequestAllocationResult) *use {
	name, _ := machine.ShareStem(r.Device)
	if given, _ := givenDevice(device, r); t.Machine.Devices[given].Interchangeable == r.Device {
		name = given
	}
	d, found := t.Machine.Devices[name]
	p := portion{claim: true, of: claim, device: r.Device}
	if end := len(name) - len(claim); !found && end > 0 { // a share of an earlier allocation
		d = t.Machine.Devices[name[:end-1]]
		p.device, p.share = d.Name, types.UID(name[end:])
	}
	if r.ShareID != nil {
		p.share = *r.ShareID
	}
	t.Parts.markPrepared(p)
	u := t.useOf(c, &d, t.Parts.size(p, nil))
	u.claim, u.share = claim, p.share
	u.open = u.open || r.AdminAccess != nil && *r.AdminAccess
	return u
}

// classicUses returns the uses for a device plugin ID. A pod keeps its devices even if the ID
// stands for other devices by now.
func (t *Tracker) classicUses(c *kubelet.Container, resourceName, id string) (uses []*use) {
	devices, has := t.withID(resourceName, id, c.Listed[resourceName])
	stranger := strings.HasPrefix(c.Pod.Name, "old-")
	if stranger && has != nil {
		has = part{} // the number of shares in the other plugin is unknown
	}
	p := portion{of: c.Pod.UID, device: resourceName + " " + id}
	has = t.Parts.size(p, has)
	var nodes []string
	for _, node := range c.Nodes {
		if len(c.Devices) > 1 || len(c.Devices[resourceName]) > 1 {
			break // the nodes cannot be matched to the devices
		}
		if numbers, there := t.Host.Node(node); there && t.isOwn(node) {
			nodes = append(nodes, numbers)
		}
	}
	for _, d := range devices {
		given := func(node string) bool { return slices.Contains(c.Nodes, "/"+node) }
		if t.Damage.IsParted(d.Silicon()) && !slices.ContainsFunc(machine.NodesOf(d), given) {
			continue // the ID stood for less than the whole card
		}
		u := t.useOf(c, d, has)
		u.vfio, u.group = d.Want[discovery.Driver] == discovery.DriverVFIO, t.Host.FunctionsOf(c.Nodes)
		u.classic, u.id, u.nodes, u.stranger, u.portion = true, id, nodes, stranger, p
		uses = append(uses, u)
	}
	return uses
}

// StrangerInfix separates the number of a share in the IDs of a vendor plugin.
const StrangerInfix = "::"

// withID returns the devices behind a device plugin ID, and the part of them that the ID stands
// for: according to the last list for the kubelet, or else according to any settings of the
// administrator so far.
func (t *Tracker) withID(resourceName, id string, listed map[string]bool) (devices []*rules.Offered, has part) {
	most := 0
	for _, f := range slices.Backward(t.Forms()) {
		var found []*rules.Offered
		ids, of := 0, part(nil)
		for _, d := range f {
			for _, offer := range d.Offers {
				if offer.Resource != resourceName || !slices.Contains(offer.IDs, id) {
					continue
				}
				found, ids = append(found, &d), len(offer.IDs)
				if slices.ContainsFunc(offer.IDs, func(id string) bool { return !listed[id] }) {
					ids = 1 // this form is not the listed one
				}
				if d.Sharing != nil {
					of = part{d.Sharing.Capacity: 1 / float64(len(offer.IDs))}
				}
			}
		}
		if len(found) > 0 && ids > most {
			devices, has, most = found, of, ids
		}
	}
	if most > 0 {
		return devices, has
	}
	base, _, _ := strings.Cut(id, StrangerInfix)
	for _, d := range t.Machine.Devices {
		for _, offer := range d.Offers {
			if offer.Resource == resourceName && slices.Contains(offer.IDs, base) {
				devices = append(devices, &d)
			}
		}
	}
	return devices, part{}
}

// ownNodes returns the numbers of the device nodes that belong to a single card. For a node without
// numbers, the container runtime reads those of the host's node (fillMissingInfo in
// pkg/cdi/container-edits_unix.go of tags.cncf.io/container-device-interface).
func (t *Tracker) ownNodes(edits specs.ContainerEdits) (numbers []string) {
	for _, node := range edits.DeviceNodes {
		if !t.isOwn(node.Path) {
			continue
		}
		if node.Major != 0 || node.Minor != 0 {
			numbers = append(numbers, fmt.Sprintf("%d:%d", node.Major, node.Minor))
		} else if present, found := t.Host.Node(cmp.Or(node.HostPath, node.Path)); found {
			numbers = append(numbers, present)
		}
	}
	return numbers
}

// isOwn reports whether a device node belongs to a single card.
func (t *Tracker) isOwn(node string) bool {
	for _, d := range t.Machine.Devices {
		if d.Interchangeable != "" && slices.Contains(machine.NodesOf(&d), strings.TrimPrefix(node, "/")) {
			return true
		}
	}
	return slices.ContainsFunc(t.Machine.Cards, func(c machine.Card) bool { return slices.Contains(c.Nodes, strings.TrimPrefix(node, "/")) })
}

// pathsOf returns the host paths of device nodes.
func pathsOf(edits specs.ContainerEdits) (paths []string) {
	for _, n := range edits.DeviceNodes {
		paths = append(paths, cmp.Or(n.HostPath, n.Path))
	}
	return paths
}
