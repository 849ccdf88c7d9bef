package passthrough

import (
	"context"
	"fmt"
	"path"
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
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
	change := b.changeUnder(lease)
	if now := unitOf(b.config.readFunction(d.Source)); d.Attributes["iommuGroup"].IntValue != nil && b.config.readFunction(d.Source).HasEntry("iommu_group") && now != UnitOf(&d) {
		return discovery.TransientError(fmt.Errorf("function %s was described in %s, and is in %s by now", path.Base(d.Source), UnitOf(&d), now))
	}
	if other := b.returned(functions[1:]); other != "" {
		return discovery.TransientError(fmt.Errorf("function %s was described under vfio, and is under its own driver by now", path.Base(other)))
	}
	if err := change.mayTake(functions, to); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("called off: %w", err) // after this point nothing is interrupted
	}
	defer b.config.Changed()
	ctx = context.WithoutCancel(ctx)
	if err := b.recordFunctions(change, functions, to, d); err != nil {
		return err
	}
	for _, source := range functions {
		if err := change.takeFunction(ctx, source, to); err != nil {
			return err
		}
	}
	if err := change.awaitNodes(ctx, d); err != nil {
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
	unit := unitOf(b.config.readFunction(d.Source))
	functions = slices.DeleteFunc(functions, func(source string) bool {
		return b.config.readFunction(source).HasEntry("iommu_group") && unitOf(b.config.readFunction(source)) != unit
	})
	now, _ := pci.GroupOthers(b.config.Host, b.config.readFunction(d.Source)) // an error leaves the list of the scan
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, source := range now {
		if slices.Contains(functions, source) || discovery.IsVFIO(b.config.readFunction(source).Driver()) {
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
		if !described || d.Passthrough != nil || r != nil && b.config.isCurrent(r) {
			continue
		}
		if driver := b.config.readFunction(source).Driver(); driver != "" && !discovery.IsVFIO(driver) {
			return source
		}
	}
	return ""
}

// isTaken reports whether all functions that passthrough of a device takes are under its vfio
// driver.
func (b *Manager) isTaken(d *discovery.Device) bool {
	functions, err := b.functionsOf(d)
	return err == nil && !slices.ContainsFunc(functions, func(source string) bool { return b.config.readFunction(source).Driver() != d.Passthrough.Driver })
}
