package list

import (
	"strings"

	"chandler.dev/discovery"
)

// Catalogue says what IDs stand for, whatever the resource: the plugin that we
// replace, or an administrator before, may have given it another name.
type Catalogue struct {
	known map[string]*Unit // by ID
	stems map[string]*Unit // by what stands before the number of a share, where the plugin had a dialect of its own
}

// CatalogueOf returns what IDs may stand for: the devices of a host with all
// that they could be offered as. Open ones are never held.
func CatalogueOf(devices []discovery.Device) Catalogue {
	c := Catalogue{make(map[string]*Unit), make(map[string]*Unit)}
	for _, d := range devices {
		if d.Open {
			continue
		}
		for _, offer := range d.Classic {
			for _, id := range offer.IDs {
				c.known[id] = c.known[id].with(d, offer)
				if stem := offer.Before(id); stem != id {
					c.stems[stem] = c.stems[stem].with(d, offer)
				}
			}
		}
	}
	return c
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
