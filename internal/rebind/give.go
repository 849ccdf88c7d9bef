package rebind

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

// Left is a unit whose functions have not been returned to their drivers.
type Left struct {
	Unit    string   // see [Unit]
	Devices []string // names of the devices on its functions, present or expected
	Failed  error    // why the last attempt to return the unit failed, nil if there was none
	Unknown bool     // the original state of a function could not be read, so no new consumer can use the unit until its return
}

// Unit returns the name of the unit that is bound and returned as a whole: an IOMMU group, or a
// device alone if its group is not known.
func Unit(d *discovery.Device) string {
	if group := d.Attributes["iommuGroup"].IntValue; group != nil {
		return "iommu-group-" + strconv.FormatInt(*group, 10)
	}
	return d.Name
}

// Left returns all units that have not been returned to their drivers, in order.
func (b *Binder) Left() (left []Left) {
	all := b.journal.All()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range all {
		l := Left{Unit: r.Group, Failed: b.failed[r.Group]}
		for _, f := range r.Body.Functions {
			name := f.Device.Name
			if name == "" {
				name = discovery.DeviceName(b.function("sys/bus/pci/devices/" + f.Address))
			}
			l.Devices, l.Unknown = append(l.Devices, name), l.Unknown || f.Choose && f.Device.Name == ""
		}
		left = append(left, l)
	}
	return left
}

// Give returns the functions of a unit to their original drivers. It returns [*ledger.Blocked] if a
// consumer, or another change, has one of the functions. A unit without a record is not an error. A
// function that was bound to another driver since stays with that driver.
func (b *Binder) Give(ctx context.Context, unit string) error {
	r := b.journal.Get(unit)
	if r == nil {
		return nil
	}
	var sources []string
	for _, f := range r.Body.Functions {
		sources = append(sources, f.Source)
	}
	lease, err := b.lease(sources, "")
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
		if err := b.give(ctx, lease, f); err != nil && failed == nil {
			failed = fmt.Errorf("it is not given back to %s: %w", orNone(f.Driver), err)
		}
	}
	if failed == nil {
		return b.forget(r)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failed[unit] = failed
	return failed
}

func orNone(driver string) string {
	if driver == "" {
		return "no driver"
	}
	return "driver " + driver
}

func (b *Binder) give(ctx context.Context, lease *ledger.Lease, r *function) error {
	function := b.function(r.Source)
	if !function.Exists(".") || !b.isCurrent(r) {
		return nil // the function was removed, and a different function may have its address
	}
	driver := function.Driver()
	if r.Choose {
		return b.choose(lease, r, driver)
	}
	if driver != "" && driver != r.To && driver != r.Driver {
		return nil
	}
	if driver == r.To && driver != r.Driver {
		if err := b.unused(r); err != nil {
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

// unused returns an error if a visible process has a function open: the kernel would wait for that
// process, and keep the function locked meanwhile.
func (b *Binder) unused(r *function) error {
	if b.config.Busy == nil {
		return nil
	}
	if err := b.config.Busy(b.function(r.Source)); err != nil && !errors.Is(err, fs.ErrPermission) {
		return discovery.Passing(fmt.Errorf("function %w", err))
	}
	return nil
}

// resetOverride restores the original driver_override of a function.
func (b *Binder) resetOverride(lease *ledger.Lease, r *function) error {
	override, err := b.override(lease, b.function(r.Source), b.config.Limit)
	if err != nil || override == r.Override {
		return err
	}
	if b.config.Write == nil {
		return errNoPrivilege
	}
	return b.write(lease, r.Address, "set its driver", path.Join(r.Source, "driver_override"), r.Override)
}

// choose makes the kernel choose the driver of a function whose original driver is unknown. If a
// driver other than vfio is bound already, that driver stays.
func (b *Binder) choose(lease *ledger.Lease, r *function, driver string) error {
	own := driver != "" && !discovery.IsVFIO(driver)
	if !own {
		if err := b.unused(r); err != nil {
			return err
		}
	}
	if err := b.resetOverride(lease, r); err != nil {
		return err
	}
	if own {
		return nil
	}
	return b.probe(lease, r, driver)
}

// probe unbinds a function and makes the kernel choose its driver.
func (b *Binder) probe(lease *ledger.Lease, r *function, driver string) error {
	if driver != "" {
		if err := b.write(lease, r.Address, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), r.Address); err != nil {
			return err
		}
	}
	return b.write(lease, r.Address, "have the kernel choose its driver", "sys/bus/pci/drivers_probe", r.Address)
}

// giveDriver binds a function to its original driver. If that driver is not loaded any more, the
// kernel chooses.
func (b *Binder) giveDriver(ctx context.Context, lease *ledger.Lease, r *function, driver string) error {
	switch {
	case r.Driver == "":
		return b.write(lease, r.Address, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), r.Address)
	case !b.loaded(r.Driver):
		return b.probe(lease, r, driver)
	}
	return b.swap(ctx, lease, r.Source, r.Driver, func() error {
		return b.write(lease, r.Address, "bind it to "+r.Driver, path.Join(driverDir(r.Driver), "bind"), r.Address)
	})
}
