package passthrough

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/ledger"
)

// bindDevice binds a device, with all functions that belong to it, to the vfio driver. bindDevice
// continues from wherever an earlier call, or an earlier agent, has stopped. The state of the
// functions is on disk before anything changes. The order is that of the kernel's documentation
// (Documentation/ABI/testing/sysfs-bus-pci, driver_override): the override comes first, so that no
// other driver takes the function in between.
func (b *Manager) bindDevice(ctx context.Context, d discovery.Device, consumer string) error {
	to := d.Passthrough.Driver
	functions, err := b.functionsOf(&d)
	if err != nil {
		return err
	}
	lease, err := b.leaseFunctions(functions, consumer)
	if err != nil {
		return err
	}
	defer lease.Release()
	if now := unitOf(b.readFunction(d.Source)); d.Attributes["iommuGroup"].IntValue != nil && b.readFunction(d.Source).HasEntry("iommu_group") && now != UnitOf(&d) {
		return discovery.TransientError(fmt.Errorf("function %s was described in %s, and is in %s by now", path.Base(d.Source), UnitOf(&d), now))
	}
	if other := b.returned(functions[1:]); other != "" {
		return discovery.TransientError(fmt.Errorf("function %s was described under vfio, and is under its own driver by now", path.Base(other)))
	}
	if err := b.mayTake(functions, to); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("called off: %w", err) // after this point nothing is interrupted
	}
	defer b.config.Changed()
	ctx = context.WithoutCancel(ctx)
	if err := b.recordFunctions(lease, functions, to, d); err != nil {
		return err
	}
	for _, source := range functions {
		if err := b.takeFunction(ctx, lease, source, to); err != nil {
			return err
		}
	}
	if err := b.awaitNodes(ctx, d); err != nil {
		return err
	}
	b.forgetFailures(functions)
	return nil
}

// functionsOf returns the functions that passthrough of a device takes, the device's own function
// first. A function that had no driver when its group was scanned, such as one that was being
// returned, is included if it has a driver by now. A function that has moved to another group since
// is not included.
func (b *Manager) functionsOf(d *discovery.Device) ([]string, error) {
	functions := append([]string{d.Source}, d.Passthrough.Others...)
	unit := unitOf(b.readFunction(d.Source))
	functions = slices.DeleteFunc(functions, func(source string) bool {
		return b.readFunction(source).HasEntry("iommu_group") && unitOf(b.readFunction(source)) != unit
	})
	now, _ := pci.GroupOthers(b.config.Host, b.readFunction(d.Source)) // an error leaves the list of the scan
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, source := range now {
		if slices.Contains(functions, source) || discovery.IsVFIO(b.readFunction(source).Driver()) {
			continue
		}
		if b.lastScan[source].Passthrough == nil {
			return nil, discovery.TransientError(fmt.Errorf("its IOMMU group also contains %s, and it is not yet known whether passthrough of that function is allowed", path.Base(source)))
		}
		functions = append(functions, source)
	}
	return functions, nil
}

// returned returns a function that the last scan found under vfio, and that is under its own driver
// by now, "" if there is none. The record of such a function would have no description, so its
// device could not be allocated until the function is returned again.
func (b *Manager) returned(functions []string) string {
	for _, source := range functions {
		b.mu.Lock()
		d, described := b.lastScan[source]
		r := b.functions[path.Base(source)]
		b.mu.Unlock()
		if !described || d.Passthrough != nil || r != nil && b.isCurrent(r) {
			continue
		}
		if driver := b.readFunction(source).Driver(); driver != "" && !discovery.IsVFIO(driver) {
			return source
		}
	}
	return ""
}

// mayTake returns why functions cannot be taken, nil if they can. All functions are checked before
// the first changes, and each again after its record is written: the disk and the writes to the
// earlier functions may have taken long.
func (b *Manager) mayTake(functions []string, to string) error {
	if b.config.Write == nil {
		return errNoPrivilege
	}
	if b.config.Busy == nil {
		return errors.New("the users of the host's functions are unknown")
	}
	if !b.isLoaded(to) {
		return fmt.Errorf("driver %s is not loaded (modprobe %s)", to, to)
	}
	var bound []sysfs.Device
	for _, source := range functions {
		function := b.readFunction(source)
		if driver := function.Driver(); driver == to || driver == "" {
			continue // already done, or no driver loses the function
		}
		if function.HasEntry("virtfn0") {
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
func (b *Manager) takeFunction(ctx context.Context, lease *ledger.Lease, source, to string) error {
	function := b.readFunction(source)
	override, err := b.driverOverride(lease, function, b.config.Limit)
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
func (b *Manager) swap(ctx context.Context, lease *ledger.Lease, source, to string, bind func() error) error {
	address := path.Base(source)
	switch driver := b.readFunction(source).Driver(); driver {
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

// awaitNodes returns when the nodes of a device under vfio can be opened, or with an error after a
// while.
func (b *Manager) awaitNodes(ctx context.Context, d discovery.Device) error {
	return b.until(ctx, func() error {
		now, err := pci.DescribePassthrough(b.config.Host, d)
		if err == nil && now.Health.Status != discovery.Healthy {
			err = errors.New(now.Health.Reason)
		}
		return err
	})
}

// isTaken reports whether all functions that passthrough of a device takes are under its vfio
// driver.
func (b *Manager) isTaken(d *discovery.Device) bool {
	functions, err := b.functionsOf(d)
	return err == nil && !slices.ContainsFunc(functions, func(source string) bool { return b.readFunction(source).Driver() != d.Passthrough.Driver })
}
