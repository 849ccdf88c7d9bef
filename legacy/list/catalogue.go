package list

import (
	"cmp"
	"slices"
	"strings"

	"chandler.dev/discovery"
)

// Catalogue finds the devices for IDs, whatever the resource. The replaced plugin, or the
// configuration before, may have used another resource name. It makes a unit only when one is
// looked for.
type Catalogue struct {
	known map[string][]offered // by ID
	stems map[string][]offered // by the text before a share's number, for plugins with a dialect of their own
	nodes []ownNodes
}

// offered is an offer of a device.
type offered struct {
	device *discovery.Device
	offer  int // index in PluginOffers
}

// ownNodes are the device nodes of a single device.
type ownNodes struct {
	device *discovery.Device
	paths  []string
}

// CatalogueOf returns a catalogue of the devices of a host with all offers of their families. It
// omits devices with unlimited sharing, since they never block each other. The catalogue refers to
// the devices, which must not be modified any more.
func CatalogueOf(devices []discovery.Device) Catalogue {
	c := Catalogue{known: make(map[string][]offered), stems: make(map[string][]offered)}
	for i := range devices {
		d := &devices[i]
		if d.Shareable {
			continue
		}
		own := ownNodes{device: d}
		for _, node := range d.OwnNodes() {
			own.paths = append(own.paths, cmp.Or(node.HostPath, node.Path))
		}
		if len(own.paths) > 0 {
			c.nodes = append(c.nodes, own)
		}
		for j := range d.PluginOffers {
			c.add(offered{d, j})
		}
	}
	return c
}

// add adds the IDs of an offer. The IDs of one device share a unit.
func (c Catalogue) add(o offered) {
	enter := func(units map[string][]offered, key string) {
		if all := units[key]; len(all) == 0 || all[len(all)-1] != o {
			units[key] = append(all, o)
		}
	}
	offer := o.device.PluginOffers[o.offer]
	for _, id := range offer.IDs {
		enter(c.known, id)
		if stem := offer.Before(id); stem != id {
			enter(c.stems, stem)
		}
	}
}

// unitOf returns the unit of the devices of offers, or nil if there are none.
func unitOf(offers []offered) (u *Unit) {
	for _, o := range offers {
		u = u.with(*o.device, o.device.PluginOffers[o.offer])
	}
	return u
}

// Find returns the unit for an ID, and whether the ID is a share of the unit. It returns nil for an
// unknown ID.
func (c Catalogue) Find(id string) (u *Unit, share bool) {
	if u := unitOf(c.known[id]); u != nil {
		return u, false
	}
	stem := strings.TrimRight(id, "0123456789")
	if stem == id {
		return nil, false
	}
	if u := unitOf(c.stems[stem]); u != nil {
		return u, true
	}
	for _, dialect := range discovery.Dialects() {
		if of, ok := strings.CutSuffix(stem, dialect.Infix); ok && c.known[of] != nil {
			return unitOf(c.known[of]), true
		}
	}
	return nil, false
}

// WithNodes returns a unit of all devices whose own device nodes were all given to a container by
// an ID, or nil. This identifies IDs found in no file of the host, such as the serial numbers of
// the Habana plugin.
func (c Catalogue) WithNodes(id string, given []string) (u *Unit) {
	if len(given) == 0 {
		return nil
	}
	for _, own := range c.nodes {
		if !slices.ContainsFunc(own.paths, func(path string) bool { return !slices.Contains(given, path) }) {
			u = u.with(*own.device, discovery.Offer{IDs: []string{id}})
		}
	}
	return u
}
