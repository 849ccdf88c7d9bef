package ledger

import (
	"sync"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// Present is the [Stock] of a snapshot without device plugin IDs.
type Present struct {
	Snapshot *rules.Snapshot // may be nil

	once  sync.Once
	parts Parts // of the snapshot, set by the first call of Parts
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

// Parts implements [Stock].
func (p *Present) Parts(silicon string) []string {
	if p == nil || p.Snapshot == nil {
		return nil
	}
	p.once.Do(func() {
		for i := range p.Snapshot.Devices {
			p.parts.Add(&p.Snapshot.Devices[i].Device)
		}
	})
	return p.parts[silicon]
}

// Parts lists the names of partitions by their physical device.
type Parts map[string][]string

// Add adds a device if the device is a partition.
func (p *Parts) Add(d *discovery.Device) {
	if d.PartOf == nil {
		return
	}
	if *p == nil {
		*p = make(Parts)
	}
	(*p)[d.PartOf.Name] = append((*p)[d.PartOf.Name], d.Name)
}

// WithID implements [Stock].
func (p *Present) WithID(string, string) (*Grant, bool) { return nil, false }
