package passthrough

import (
	"context"
	"fmt"
	"strconv"

	"chandler.dev/discovery"
)

// LeftUnit is a unit whose functions have not been returned to their drivers.
type LeftUnit struct {
	Unit          string   // see [UnitOf]
	Devices       []string // names of the devices on its functions, present or expected
	Err           error    // why the last attempt to return the unit failed, nil if there was none
	DriverUnknown bool     // the original state of a function could not be read, so no new consumer can use the unit until its return
}

// UnitOf returns the name of the unit that is bound and returned as a whole: an IOMMU group, or a
// device alone if its group is not known.
func UnitOf(d *discovery.Device) string {
	if group := d.Attributes["iommuGroup"].IntValue; group != nil {
		return "iommu-group-" + strconv.FormatInt(*group, 10)
	}
	return d.Name
}

// LeftUnits returns all units that have not been returned to their drivers, in order.
func (b *Manager) LeftUnits() (left []LeftUnit) {
	all := b.journal.All()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range all {
		l := LeftUnit{Unit: r.Group, Err: b.failures[r.Group]}
		for _, f := range r.Body.Functions {
			name := f.Device.Name
			if name == "" {
				name = discovery.DeviceName(b.config.readFunction("sys/bus/pci/devices/" + f.Address))
			}
			l.Devices, l.DriverUnknown = append(l.Devices, name), l.DriverUnknown || f.Choose && f.Device.Name == ""
		}
		left = append(left, l)
	}
	return left
}

// ReturnUnit returns the functions of a unit to their original drivers. It returns
// [*exclusion.Blocked] if a consumer, or another change, has one of the functions. A unit without a
// record is not an error. A function that was bound to another driver since stays with that driver.
func (b *Manager) ReturnUnit(ctx context.Context, unit string) error {
	r := b.journal.Get(unit)
	if r == nil {
		return nil
	}
	var sources []string
	for _, f := range r.Body.Functions {
		sources = append(sources, f.Source)
	}
	lease, err := b.leaseFunctions(sources, "")
	if err != nil {
		return err
	}
	defer b.config.Changed()
	defer lease.Release()
	if b.journal.Get(unit) != r {
		return nil // the record changed before the lease
	}
	change, failed := b.changeUnder(lease), error(nil)
	for _, f := range r.Body.Functions {
		if err := change.returnFunction(ctx, f); err != nil && failed == nil {
			failed = fmt.Errorf("it is not returned to %s: %w", orNone(f.Driver), err)
		}
	}
	if failed == nil {
		return b.removeRecord(r)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failures[unit] = failed
	return failed
}
