package rebind

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/ledger"
)

// take binds a device, with all functions that belong to it, to the vfio driver. take continues
// from wherever an earlier call, or an earlier agent, has stopped. The state of the functions is on
// disk before anything changes. The order is that of the kernel's documentation
// (Documentation/ABI/testing/sysfs-bus-pci, driver_override): the override comes first, so that no
// other driver takes the function in between.
func (b *Binder) take(ctx context.Context, d discovery.Device, consumer string) error {
	to := d.Rebind.Driver
	functions, err := b.functionsOf(&d)
	if err != nil {
		return err
	}
	lease, err := b.lease(functions, consumer)
	if err != nil {
		return err
	}
	defer lease.Release()
	if now := unitOf(b.function(d.Source)); d.Attributes["iommuGroup"].IntValue != nil && b.function(d.Source).Exists("iommu_group") && now != Unit(&d) {
		return discovery.Passing(fmt.Errorf("function %s was described in %s, and is in %s by now", path.Base(d.Source), Unit(&d), now))
	}
	if other := b.returned(functions[1:]); other != "" {
		return discovery.Passing(fmt.Errorf("function %s was described under vfio, and is under its own driver by now", path.Base(other)))
	}
	if err := b.mayTake(functions, to); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("called off: %w", err) // after this point nothing is interrupted
	}
	defer b.config.Changed()
	ctx = context.WithoutCancel(ctx)
	if err := b.note(lease, functions, to, d); err != nil {
		return err
	}
	for _, source := range functions {
		if err := b.takeFunction(ctx, lease, source, to); err != nil {
			return err
		}
	}
	if err := b.await(ctx, d); err != nil {
		return err
	}
	b.wanted(functions)
	return nil
}

// functionsOf returns the functions that passthrough of a device takes, the device's own function
// first. A function that had no driver when its group was scanned, such as one that was being
// returned, is included if it has a driver by now. A function that has moved to another group since
// is not included.
func (b *Binder) functionsOf(d *discovery.Device) ([]string, error) {
	functions := append([]string{d.Source}, d.Rebind.Others...)
	unit := unitOf(b.function(d.Source))
	functions = slices.DeleteFunc(functions, func(source string) bool {
		return b.function(source).Exists("iommu_group") && unitOf(b.function(source)) != unit
	})
	now, _ := discovery.GroupOthers(b.config.Host, b.function(d.Source)) // an error leaves the list of the scan
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, source := range now {
		if slices.Contains(functions, source) || discovery.IsVFIO(b.function(source).Driver()) {
			continue
		}
		if b.seen[source].Rebind == nil {
			return nil, discovery.Passing(fmt.Errorf("its IOMMU group also contains %s, and it is not yet known whether passthrough of that function is allowed", path.Base(source)))
		}
		functions = append(functions, source)
	}
	return functions, nil
}

// returned returns a function that the last scan found under vfio, and that is under its own driver
// by now, "" if there is none. The record of such a function would have no description, so its device
// could not be allocated until the function is returned again.
func (b *Binder) returned(functions []string) string {
	for _, source := range functions {
		b.mu.Lock()
		d, described := b.seen[source]
		r := b.bound[path.Base(source)]
		b.mu.Unlock()
		if !described || d.Rebind != nil || r != nil && b.isCurrent(r) {
			continue
		}
		if driver := b.function(source).Driver(); driver != "" && !discovery.IsVFIO(driver) {
			return source
		}
	}
	return ""
}

// mayTake returns why functions cannot be taken, nil if they can. All functions are checked before
// the first changes, and each again after its record is written: the disk and the writes to the
// earlier functions may have taken long.
func (b *Binder) mayTake(functions []string, to string) error {
	if b.config.Write == nil {
		return errNoPrivilege
	}
	if b.config.Busy == nil {
		return errors.New("the users of the host's functions are unknown")
	}
	if !b.loaded(to) {
		return fmt.Errorf("driver %s is not loaded (modprobe %s)", to, to)
	}
	var bound []sysfs.Device
	for _, source := range functions {
		function := b.function(source)
		if driver := function.Driver(); driver == to || driver == "" {
			continue // already done, or no driver loses the function
		}
		if function.Exists("virtfn0") {
			return fmt.Errorf("function %s has virtual functions", function.Name())
		}
		bound = append(bound, function)
	}
	if len(bound) == 0 {
		return nil
	}
	if err := b.config.Busy(bound...); err != nil {
		return fmt.Errorf("function %w", err)
	}
	return nil
}

// takeFunction binds one function to the vfio driver.
func (b *Binder) takeFunction(ctx context.Context, lease *ledger.Lease, source, to string) error {
	function := b.function(source)
	override, err := b.override(lease, function, b.config.Limit)
	if err != nil {
		return err
	}
	address := function.Name()
	if err := b.mayTake([]string{source}, to); err != nil {
		return err
	}
	if override != to {
		if err := b.write(lease, address, "set its driver", path.Join(source, "driver_override"), to); err != nil {
			return err
		}
	}
	return b.swap(ctx, lease, source, to, func() error {
		return b.write(lease, address, "bind it to "+to, "sys/bus/pci/drivers_probe", address)
	})
}

// swap unbinds a function from its present driver, unless that is the wanted driver, and binds the
// function.
func (b *Binder) swap(ctx context.Context, lease *ledger.Lease, source, to string, bind func() error) error {
	address := path.Base(source)
	switch driver := b.function(source).Driver(); driver {
	case to:
		return nil
	case "":
	default:
		if err := b.write(lease, address, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), address); err != nil {
			return err
		}
	}
	return b.bind(ctx, lease, source, to, bind)
}

// await returns when the nodes of a device under vfio can be opened, or with an error after a
// while.
func (b *Binder) await(ctx context.Context, d discovery.Device) error {
	return b.until(ctx, func() error {
		now, err := discovery.Rebound(b.config.Host, d)
		if err == nil && now.Health.Status != discovery.Healthy {
			err = errors.New(now.Health.Reason)
		}
		return err
	})
}

// isTaken reports whether all functions that passthrough of a device takes are under its vfio
// driver.
func (b *Binder) isTaken(d *discovery.Device) bool {
	functions, err := b.functionsOf(d)
	return err == nil && !slices.ContainsFunc(functions, func(source string) bool { return b.function(source).Driver() != d.Rebind.Driver })
}
