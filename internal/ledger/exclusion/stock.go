package exclusion

import (
	"slices"
	"strings"
	"sync"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/ledger/allocation"
)

// Stock is the set of the host's present devices.
type Stock interface {
	// Device returns a device by its name in the snapshot, or by the name of a share in
	// ResourceSlices.
	Device(name string) (rules.Offered, bool)

	// Names returns the names of all devices.
	Names() []string

	// Parts returns the names of the partitions of a physical device.
	Parts(silicon string) []string

	// WithID returns the grant for a device plugin ID of any plugin, or nil if the ID is not known.
	// ours reports whether this agent serves the resource.
	WithID(resource, id string) (g *allocation.Grant, ours bool)
}

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
func (p *Present) WithID(string, string) (*allocation.Grant, bool) { return nil, false }

// HoldsOn returns the holds of all devices on PCI functions. A function without a device in s, such
// as one whose device was just excluded, has the hold of the device with the name of the function: a
// container may have got it before.
func HoldsOn(s Stock, functions ...string) (holds []allocation.Hold) {
	known := make(map[string]bool)
	for _, name := range s.Names() {
		d, _ := s.Device(name)
		on := slices.IndexFunc(functions, func(function string) bool { return d.Source == function || strings.HasPrefix(d.Source, function+"/") })
		if on >= 0 {
			known[functions[on]] = true
			holds = append(holds, allocation.DeviceHold(d.Name, d.Silicon()))
		}
	}
	for _, function := range functions {
		if !known[function] {
			holds = append(holds, allocation.DeviceHold(discovery.DeviceName(sysfs.At(nil, function)), ""))
		}
	}
	return holds
}
