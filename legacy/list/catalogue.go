package list

import (
	"cmp"
	"slices"
	"strings"

	"chandler.dev/discovery"
)

// Catalogue says what IDs stand for, whatever the resource: the plugin that we
// replace, or an administrator before, may have given it another name.
type Catalogue struct {
	known map[string]*Unit // by ID
	stems map[string]*Unit // by what stands before the number of a share, where the plugin had a dialect of its own
	nodes []ownNodes
}

// ownNodes are the device nodes that a device and no other silicon has.
type ownNodes struct {
	device discovery.Device
	paths  []string
}

// CatalogueOf returns what IDs may stand for: the devices of a host with all
// that they could be offered as. Open ones are never held.
func CatalogueOf(devices []discovery.Device) Catalogue {
	c := Catalogue{known: make(map[string]*Unit), stems: make(map[string]*Unit)}
	for _, d := range devices {
		if d.Open {
			continue
		}
		own := ownNodes{device: d}
		for _, node := range d.OwnNodes() {
			own.paths = append(own.paths, cmp.Or(node.HostPath, node.Path))
		}
		if len(own.paths) > 0 {
			c.nodes = append(c.nodes, own)
		}
		for _, offer := range d.Classic {
			c.add(d, offer)
		}
	}
	return c
}

// add enters what the IDs of an offer stand for. The IDs of one device share a unit.
func (c Catalogue) add(d discovery.Device, offer discovery.Offer) {
	alone := (*Unit)(nil).with(d, offer)
	enter := func(units map[string]*Unit, key string) {
		switch units[key] {
		case alone:
		case nil:
			units[key] = alone
		default:
			units[key] = units[key].with(d, offer)
		}
	}
	for _, id := range offer.IDs {
		enter(c.known, id)
		if stem := offer.Before(id); stem != id {
			enter(c.stems, stem)
		}
	}
}

// Find returns what an ID stands for, or would be a share of; nil if nothing is
// known of it.
func (c Catalogue) Find(id string) (u *Unit, share bool) {
	if u := c.known[id]; u != nil {
		return u, false
	}
	stem := strings.TrimRight(id, "0123456789")
	if stem == id {
		return nil, false
	}
	if u := c.stems[stem]; u != nil {
		return u, true
	}
	for _, dialect := range discovery.Dialects() {
		if of, ok := strings.CutSuffix(stem, dialect.Infix); ok && c.known[of] != nil {
			return c.known[of], true
		}
	}
	return nil, false
}

// WithNodes returns what an ID stands for by which a container was given device nodes:
// the devices that it has all nodes of, nil if there are none. So an ID is understood
// that no file of the host has, as the serial numbers of Habana's plugin.
func (c Catalogue) WithNodes(id string, given []string) (u *Unit) {
	if len(given) == 0 {
		return nil
	}
	for _, own := range c.nodes {
		if !slices.ContainsFunc(own.paths, func(path string) bool { return !slices.Contains(given, path) }) {
			u = u.with(own.device, discovery.Offer{IDs: []string{id}})
		}
	}
	return u
}
