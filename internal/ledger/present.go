package ledger

import (
	"maps"
	"slices"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// Present is the [Stock] of a snapshot without classic IDs.
type Present struct {
	Snapshot *rules.Snapshot // may be nil

	nodes  map[string][]string // which devices have a node that no other silicon has, by path
	common map[string]bool     // paths and numbers of nodes that several pieces of silicon have, or had
}

// NewPresent returns the stock of a snapshot that follows another, which may be
// nil. A node that several pieces of silicon had at once is one of many, also
// when only one of them is left.
func NewPresent(s *rules.Snapshot, before *Present) *Present {
	p := &Present{Snapshot: s, nodes: make(map[string][]string), common: make(map[string]bool)}
	if before != nil {
		maps.Copy(p.common, before.common)
	}
	silicon := make(map[string]string) // by path and numbers
	for i := range s.Devices {
		d := &s.Devices[i].Device
		for _, n := range nodesIn(d) {
			for _, term := range n.terms() {
				if whose, seen := silicon[term]; seen && whose != d.Silicon() && !outdated(d) {
					p.common[term] = true
				}
				if !outdated(d) {
					silicon[term] = d.Silicon()
				}
			}
		}
	}
	for i := range s.Devices {
		d := &s.Devices[i].Device
		for _, n := range nodesIn(d) {
			if !slices.ContainsFunc(n.terms(), func(term string) bool { return p.common[term] }) {
				p.nodes[n.Path] = append(p.nodes[n.Path], d.Name)
			}
		}
	}
	return p
}

// outdated reports whether a device may have other nodes by now than it is
// described with: it cannot be read, or no driver is bound to it any more.
func outdated(d *discovery.Device) bool {
	_, pci := d.Attributes[deviceattribute.StandardDeviceAttributePCIBusID]
	return d.Health.Status == discovery.Unknown || pci && d.Attributes.String("driver") == ""
}

// Device implements [Stock].
func (p *Present) Device(name string) (rules.Offered, bool) {
	if p == nil || p.Snapshot == nil {
		return rules.Offered{}, false
	}
	return p.Snapshot.Lookup(name)
}

// Names implements [Stock].
func (p *Present) Names() (names []string) {
	if p == nil || p.Snapshot == nil {
		return nil
	}
	for i := range p.Snapshot.Devices {
		names = append(names, p.Snapshot.Devices[i].Name)
	}
	return names
}

// WithNode implements [Stock].
func (p *Present) WithNode(path string) []string {
	if p == nil {
		return nil
	}
	return p.nodes[path]
}

// WithID implements [Stock].
func (p *Present) WithID(string, string) (*Grant, bool) { return nil, false }
