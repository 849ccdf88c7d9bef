package rebind

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"

	"chandler.dev/discovery"
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

// Unit returns the name of what goes to vfio and back together: an IOMMU group, or a device
// alone. Parts of silicon that do not compete, such as virtual functions of one adapter,
// go each by itself.
func Unit(d *discovery.Device) string {
	if d.PartOf != nil && len(d.PartOf.Counters) == 0 {
		return d.Name
	}
	return d.Silicon()
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

// Give gives a function back to the driver that it had. The caller keeps others from it.
// It is no error if there is nothing to give back. A function that somebody else has bound to
// a driver since is theirs.
func (b *Binder) Give(ctx context.Context, address string) error {
	b.mu.Lock()
	r := b.bound[address]
	b.mu.Unlock()
	if r == nil {
		return nil
	}
	leave, err := b.enter([]string{r.Source})
	if err == nil {
		defer leave()
		err = b.give(ctx, r)
	}
	if err != nil {
		err = fmt.Errorf("it is not given back to %s: %w", orNone(r.Driver), err)
		b.mu.Lock()
		b.failed[address] = err
		b.mu.Unlock()
	}
	b.config.Changed()
	return err
}

func orNone(driver string) string {
	if driver == "" {
		return "no driver"
	}
	return "driver " + driver
}

func (b *Binder) give(ctx context.Context, r *record) error {
	function := b.function(r.Source)
	if !function.Exists(".") {
		return b.forget(r) // it was taken out, or is a virtual function that is no more
	}
	driver := function.Driver()
	if r.Choose {
		return b.choose(r, driver)
	}
	if driver != "" && driver != r.To && driver != r.Driver {
		return b.forget(r)
	}
	if driver == r.To && driver != r.Driver {
		if err := b.unused(r); err != nil {
			return err
		}
	}
	if err := b.resetOverride(r); err != nil {
		return err
	}
	if driver != r.Driver {
		if err := b.giveDriver(ctx, r, driver); err != nil {
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
func (b *Binder) resetOverride(r *record) error {
	override, err := b.override(b.function(r.Source), b.config.Limit)
	if err != nil || override == r.Override {
		return err
	}
	if b.config.Write == nil {
		return errNoPrivilege
	}
	return b.write(r.Function, "set its driver", path.Join(r.Source, "driver_override"), r.Override)
}

// choose has the kernel choose the driver of a function of which it is not known which one it had. If
// it has one of its own, that is the one.
func (b *Binder) choose(r *record, driver string) error {
	own := driver != "" && !discovery.IsVFIO(driver)
	if !own {
		if err := b.unused(r); err != nil {
			return err
		}
	}
	if err := b.resetOverride(r); err != nil {
		return err
	}
	if !own {
		if err := b.probe(r, driver); err != nil {
			return err
		}
	}
	return b.forget(r)
}

// probe has the kernel choose a driver.
func (b *Binder) probe(r *record, driver string) error {
	if driver != "" {
		if err := b.write(r.Function, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), r.Function); err != nil {
			return err
		}
	}
	return b.write(r.Function, "have the kernel choose its driver", "sys/bus/pci/drivers_probe", r.Function)
}

// giveDriver binds a function to the driver that it had. If that is not loaded any more, the
// kernel chooses.
func (b *Binder) giveDriver(ctx context.Context, r *record, driver string) error {
	switch {
	case r.Driver == "":
		return b.write(r.Function, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), r.Function)
	case !b.loaded(r.Driver):
		return b.probe(r, driver)
	}
	return b.swap(ctx, r.Source, r.Driver, func() error {
		return b.write(r.Function, "bind it to "+r.Driver, path.Join(driverDir(r.Driver), "bind"), r.Function)
	})
}
