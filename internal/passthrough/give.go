package passthrough

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger"
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
				name = discovery.DeviceName(b.readFunction("sys/bus/pci/devices/" + f.Address))
			}
			l.Devices, l.DriverUnknown = append(l.Devices, name), l.DriverUnknown || f.Choose && f.Device.Name == ""
		}
		left = append(left, l)
	}
	return left
}

// ReturnUnit returns the functions of a unit to their original drivers. It returns
// [*ledger.Blocked] if a consumer, or another change, has one of the functions. A unit without a
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
	var failed error
	for _, f := range r.Body.Functions {
		if err := b.returnFunction(ctx, lease, f); err != nil && failed == nil {
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

func orNone(driver string) string {
	if driver == "" {
		return "no driver"
	}
	return "driver " + driver
}

func (b *Manager) returnFunction(ctx context.Context, lease *ledger.Lease, r *function) error {
	function := b.readFunction(r.Source)
	if !function.HasEntry(".") || !b.isCurrent(r) {
		return nil // the function was removed, and a different function may have its address
	}
	driver := function.Driver()
	if r.Choose {
		return b.chooseDriver(lease, r, driver)
	}
	if driver != "" && driver != r.To && driver != r.Driver {
		return nil
	}
	if driver == r.To && driver != r.Driver {
		if err := b.checkUnused(r); err != nil {
			return err
		}
	}
	if err := b.resetOverride(lease, r); err != nil {
		return err
	}
	if driver == r.Driver {
		return nil
	}
	return b.giveDriver(ctx, lease, r, driver)
}

// checkUnused returns an error if a visible process has a function open: the kernel would wait for
// that process, and keep the function locked meanwhile.
func (b *Manager) checkUnused(r *function) error {
	if b.config.Busy == nil {
		return nil
	}
	if err := b.config.Busy(b.readFunction(r.Source)); err != nil && !errors.Is(err, fs.ErrPermission) {
		return discovery.TransientError(fmt.Errorf("function %w", err))
	}
	return nil
}

// resetOverride restores the original driver_override of a function.
func (b *Manager) resetOverride(lease *ledger.Lease, r *function) error {
	override, err := b.driverOverride(lease, b.readFunction(r.Source), b.config.Limit)
	if err != nil || override == r.Override {
		return err
	}
	if b.config.Write == nil {
		return errNoPrivilege
	}
	return b.write(lease, r.Address, "set its driver", path.Join(r.Source, "driver_override"), r.Override)
}

// chooseDriver makes the kernel choose the driver of a function whose original driver is unknown.
// If a driver other than vfio is bound already, that driver stays.
func (b *Manager) chooseDriver(lease *ledger.Lease, r *function, driver string) error {
	own := driver != "" && !discovery.IsVFIO(driver)
	if !own {
		if err := b.checkUnused(r); err != nil {
			return err
		}
	}
	if err := b.resetOverride(lease, r); err != nil {
		return err
	}
	if own {
		return nil
	}
	return b.probeDriver(lease, r, driver)
}

// probeDriver unbinds a function and makes the kernel choose its driver.
func (b *Manager) probeDriver(lease *ledger.Lease, r *function, driver string) error {
	if driver != "" {
		if err := b.write(lease, r.Address, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), r.Address); err != nil {
			return err
		}
	}
	return b.write(lease, r.Address, "have the kernel choose its driver", "sys/bus/pci/drivers_probe", r.Address)
}

// giveDriver binds a function to its original driver. If that driver is not loaded any more, the
// kernel chooses.
func (b *Manager) giveDriver(ctx context.Context, lease *ledger.Lease, r *function, driver string) error {
	switch {
	case r.Driver == "":
		return b.write(lease, r.Address, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), r.Address)
	case !b.isLoaded(r.Driver):
		return b.probeDriver(lease, r, driver)
	}
	return b.swap(ctx, lease, r.Source, r.Driver, func() error {
		return b.write(lease, r.Address, "bind it to "+r.Driver, path.Join(driverDir(r.Driver), "bind"), r.Address)
	})
}
