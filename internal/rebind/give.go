package rebind

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger"
)

// Left is a function that is not what it was, as it was left by those who had it as vfio.
type Left struct {
	Function string // its address
	Device   string // the name of the device that is the function, or would be
	Silicon  string // of which the device is
	Unit     string // of which the device is; see [Unit]
	Failed   error  // why it could not be given back at the last attempt, nil if it was not tried
	Unknown  bool   // what it was could not be read, so that nobody new can have it until it was given back
}

// Unit returns the name of what goes to vfio and back together: an IOMMU group, or a device alone if its group is not
// known.
func Unit(d *discovery.Device) string {
	if group := d.Attributes["iommuGroup"].IntValue; group != nil {
		return "iommu-group-" + strconv.FormatInt(*group, 10)
	}
	return d.Name
}

// Left returns all functions that are not what they were, in order.
func (b *Binder) Left() (left []Left) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, address := range slices.Sorted(maps.Keys(b.bound)) {
		r := b.bound[address]
		l := Left{Function: address, Device: r.Device.Name, Silicon: r.Device.Silicon(), Unit: Unit(&r.Device), Failed: b.failed[address]}
		if l.Device == "" {
			l.Device = discovery.DeviceName(b.function("sys/bus/pci/devices/" + address))
			l.Silicon, l.Unit, l.Unknown = l.Device, l.Device, true
		}
		left = append(left, l)
	}
	return left
}

// Give gives functions of one unit back to the drivers that they had, and returns [*ledger.Blocked] if a consumer, or
// another change, has one of them. It is no error if there is nothing to give back. A function that was bound to
// another driver since stays with that driver.
func (b *Binder) Give(ctx context.Context, addresses ...string) error {
	var records []*record
	var functions []string
	b.mu.Lock()
	for _, address := range addresses {
		if r := b.bound[address]; r != nil {
			records, functions = append(records, r), append(functions, r.Source)
		}
	}
	b.mu.Unlock()
	if len(records) == 0 {
		return nil
	}
	lease, err := b.lease(functions, "")
	if err != nil {
		return err
	}
	defer b.config.Changed()
	defer lease.Release()
	for _, r := range records {
		if err := b.give(ctx, lease, r); err != nil {
			err = fmt.Errorf("it is not given back to %s: %w", orNone(r.Driver), err)
			b.mu.Lock()
			b.failed[r.Function] = err
			b.mu.Unlock()
			return err
		}
	}
	return nil
}

func orNone(driver string) string {
	if driver == "" {
		return "no driver"
	}
	return "driver " + driver
}

func (b *Binder) give(ctx context.Context, lease *ledger.Lease, r *record) error {
	function := b.function(r.Source)
	if !function.Exists(".") {
		return b.forget(r) // it was taken out, or is a virtual function that is no more
	}
	driver := function.Driver()
	if r.Choose {
		return b.choose(lease, r, driver)
	}
	if driver != "" && driver != r.To && driver != r.Driver {
		return b.forget(r)
	}
	if driver == r.To && driver != r.Driver {
		if err := b.unused(r); err != nil {
			return err
		}
	}
	if err := b.resetOverride(lease, r); err != nil {
		return err
	}
	if driver != r.Driver {
		if err := b.giveDriver(ctx, lease, r, driver); err != nil {
			return err
		}
	}
	return b.forget(r)
}

// unused returns who has a function open, as far as that can be seen: the kernel would wait for it, and
// keep the function locked meanwhile.
func (b *Binder) unused(r *record) error {
	if b.config.Busy == nil {
		return nil
	}
	if err := b.config.Busy(b.function(r.Source)); err != nil && !errors.Is(err, fs.ErrPermission) {
		return discovery.Passing(err)
	}
	return nil
}

// resetOverride has the function be for the driver that it was for whatever its identity.
func (b *Binder) resetOverride(lease *ledger.Lease, r *record) error {
	override, err := b.override(lease, b.function(r.Source), b.config.Limit)
	if err != nil || override == r.Override {
		return err
	}
	if b.config.Write == nil {
		return errNoPrivilege
	}
	return b.write(lease, r.Function, "set its driver", path.Join(r.Source, "driver_override"), r.Override)
}

// choose has the kernel choose the driver of a function of which it is not known which one it had. If
// it has one of its own, that is the one.
func (b *Binder) choose(lease *ledger.Lease, r *record, driver string) error {
	own := driver != "" && !discovery.IsVFIO(driver)
	if !own {
		if err := b.unused(r); err != nil {
			return err
		}
	}
	if err := b.resetOverride(lease, r); err != nil {
		return err
	}
	if !own {
		if err := b.probe(lease, r, driver); err != nil {
			return err
		}
	}
	return b.forget(r)
}

// probe has the kernel choose a driver.
func (b *Binder) probe(lease *ledger.Lease, r *record, driver string) error {
	if driver != "" {
		if err := b.write(lease, r.Function, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), r.Function); err != nil {
			return err
		}
	}
	return b.write(lease, r.Function, "have the kernel choose its driver", "sys/bus/pci/drivers_probe", r.Function)
}

// giveDriver binds a function to the driver that it had. If that is not loaded any more, the
// kernel chooses.
func (b *Binder) giveDriver(ctx context.Context, lease *ledger.Lease, r *record, driver string) error {
	switch {
	case r.Driver == "":
		return b.write(lease, r.Function, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), r.Function)
	case !b.loaded(r.Driver):
		return b.probe(lease, r, driver)
	}
	return b.swap(ctx, lease, r.Source, r.Driver, func() error {
		return b.write(lease, r.Function, "bind it to "+r.Driver, path.Join(driverDir(r.Driver), "bind"), r.Function)
	})
}
