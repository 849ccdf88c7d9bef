package list

import (
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// Stock contains the devices of a host for the ledger. It is never modified.
type Stock struct {
	devices      map[string]*discovery.Device
	names        []string
	parts        exclusion.Parts
	catalogue    Catalogue
	lists        Lists
	foreignNodes map[string][]string // device nodes given to containers, by key of a grant
}

var _ exclusion.Stock = (*Stock)(nil)

// StockOf returns the stock of a host with the devices, whichever API offers them, and with the
// offers of their families. The lists determine which resources belong to Chandler. The stock
// refers to the devices, which must not be modified any more.
func StockOf(devices []discovery.Device, lists Lists) *Stock {
	s := &Stock{
		devices:   make(map[string]*discovery.Device, len(devices)),
		catalogue: CatalogueOf(devices),
		lists:     lists,
	}
	for i := range devices {
		d := &devices[i]
		s.devices[d.Name] = d
		s.names = append(s.names, d.Name)
		s.parts.Add(d)
	}
	return s
}

// WithDevices returns the stock with other devices.
func (s *Stock) WithDevices(devices []discovery.Device) *Stock {
	other := StockOf(devices, s.lists)
	other.foreignNodes = s.foreignNodes
	return other
}

// With returns the stock with other lists.
func (s *Stock) With(lists Lists) *Stock {
	other := *s
	other.lists = lists
	return &other
}

// WithNodes returns the stock with device nodes that replaced plugins gave to containers, by the
// keys of grants.
func (s *Stock) WithNodes(given map[string][]string) *Stock {
	other := *s
	other.foreignNodes = given
	return &other
}

// KnowsDevices reports whether the devices of an ID can be found without the device nodes of its
// container.
func (s *Stock) KnowsDevices(resource, id string) bool {
	if l := s.lists.lists[resource]; l != nil && l.Unit(id) != nil {
		return true
	}
	u, _ := s.catalogue.Find(id)
	return u != nil
}

// Device implements [exclusion.Stock].
func (s *Stock) Device(name string) (rules.Offered, bool) {
	d, found := s.devices[name]
	if !found {
		return rules.Offered{}, false
	}
	return rules.Offered{Device: *d}, true
}

// Names implements [exclusion.Stock].
func (s *Stock) Names() []string { return s.names }

// Parts implements [exclusion.Stock].
func (s *Stock) Parts(silicon string) []string { return s.parts[silicon] }

// WithID implements [exclusion.Stock].
func (s *Stock) WithID(resource, id string) (g *allocation.Grant, ours bool) {
	l := s.lists.lists[resource]
	if l != nil {
		if u := l.Unit(id); u != nil {
			return u.Grant(resource, id, s), true
		}
	}
	u, share := s.catalogue.Find(id) // in another dialect, such as a replaced plugin's
	if u == nil {
		u = s.catalogue.WithNodes(id, s.foreignNodes[allocation.GrantKey(resource, id)])
	}
	if u == nil {
		return nil, l != nil
	}
	g = u.Grant(resource, id, s)
	g.Exclusive = g.Exclusive && !share
	return g, l != nil
}
