package passthrough

import (
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
)

// Configurer returns a configurer that binds devices to vfio for claims with that parameter, and
// calls the next one for all other claims. A device on its way back to its own driver is not
// available.
func (b *Manager) Configurer(next discovery.Configurer) discovery.Configurer {
	return func(d discovery.Device, want discovery.Parameters, consumer string) (discovery.Device, discovery.Work, error) {
		r := b.recordOf(&d)
		switch {
		case want[discovery.Driver] == "" && r != nil:
			return d, nil, b.notYet(&d, r)
		case want[discovery.Driver] == "":
			return next(d, want, consumer)
		case r == nil && discovery.IsVFIO(d.Attributes.String("driver")):
			return d, nil, nil // the device was under vfio before, and stays there
		case d.Passthrough == nil || d.Passthrough.Why != "":
			return d, nil, fmt.Errorf("device %s: it cannot be bound to vfio", d.Name)
		}
		if b.isTaken(&d) {
			now, err := pci.DescribePassthrough(b.config.Host, d)
			if err != nil {
				return d, nil, fmt.Errorf("device %s: %w", d.Name, err)
			}
			now.Family, now.Health = b.config.Family, d.Health
			functions, _ := b.functionsOf(&d) // isTaken has checked the error
			if b.forgetFailures(functions) {
				b.config.Changed()
			}
			return now, nil, nil
		}
		now := d
		now.Family = b.config.Family
		now.Edits.DeviceNodes, now.Edits.NetDevices, now.Edits.Mounts, now.Edits.Env, now.Edits.Hooks = nil, nil, nil, nil, nil
		return now, func(ctx context.Context) error {
			if err := b.bindDevice(ctx, d, consumer); err != nil {
				return fmt.Errorf("device %s: %w", d.Name, err)
			}
			return nil
		}, nil
	}
}

// forgetFailures forgets why functions could not be returned to their drivers, because a consumer
// wants them under vfio. It reports whether there was such a failure.
func (b *Manager) forgetFailures(sources []string) (had bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, source := range sources {
		if f := b.functions[path.Base(source)]; f != nil && b.failures[f.unit] != nil {
			delete(b.failures, f.unit)
			had = true
		}
	}
	return had
}

// notYet returns an error for a device that is still under vfio, with the reason if its return
// failed.
func (b *Manager) notYet(d *discovery.Device, r *function) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if failed := b.failures[r.unit]; failed != nil {
		return fmt.Errorf("device %s: %w", d.Name, failed)
	}
	return discovery.TransientError(fmt.Errorf("device %s: it remains under %s until it is returned to %s", d.Name, orNone(r.To), orNone(r.Driver)))
}

// DescribeDevices returns a snapshot with the original descriptions of bound devices, so that
// selectors still match, and with their nodes and health under vfio. The originals replace all
// descriptions of the same functions.
func (b *Manager) DescribeDevices(s *discovery.Snapshot) *discovery.Snapshot {
	b.forgetReturned()
	b.mu.Lock()
	clear(b.lastScan)
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Passthrough != nil || discovery.IsVFIO(d.Attributes.String("driver")) {
			b.lastScan[d.Source] = *d
		}
	}
	records := make(map[string]*function, len(b.functions)) // by directory
	for _, r := range b.functions {
		if r.Device.Name != "" {
			records[r.Source] = r
		}
	}
	b.mu.Unlock()
	maps.DeleteFunc(records, func(_ string, r *function) bool { return !b.config.isCurrent(r) })
	if len(records) == 0 {
		return s
	}
	described := make(map[string]*discovery.Device)
	seen := make(map[string]*discovery.Device) // by directory
	for i := range s.Devices {
		if d := &s.Devices[i]; records[d.Source] != nil {
			described[d.Name] = nil
			if d.Name == records[d.Source].Device.Name {
				seen[d.Source] = d
			}
		}
	}
	for source, r := range records {
		if b.config.readFunction(source).HasEntry(".") {
			d := b.describeFunction(r, seen[source])
			described[d.Name] = &d
		}
	}
	now := *s.ReplaceDevices(described)
	now.Devices = discovery.JoinGroups(now.Devices, func(d *discovery.Device) bool { return records[d.Source] != nil })
	return &now
}

// overrideReadLimit is how long a scan waits for a function's driver_override, because the kernel takes the
// function's lock for a read (driver_override_show in drivers/pci/pci-sysfs.c, Linux 6.1 and 6.12).
const overrideReadLimit = time.Second

// forgetReturned removes the records of functions that the kernel has registered again, and of
// functions that an administrator has bound to their own drivers. A function that was registered
// again may be in another IOMMU group, and the kernel has forgotten its binding.
func (b *Manager) forgetReturned() {
	b.mu.Lock()
	records := slices.Collect(maps.Values(b.functions))
	b.mu.Unlock()
	for _, r := range records {
		if b.hasReturned(r) {
			b.forgetIfReturned(r)
		}
	}
}

// hasReturned reports whether a function is under its original driver, or a different function has
// its address.
func (b *Manager) hasReturned(r *function) bool {
	function := b.config.readFunction(r.Source)
	if !b.config.isCurrent(r) {
		return true
	}
	return !r.Choose && r.Driver != r.To && function.Driver() == r.Driver && function.HasEntry(".")
}

// forgetIfReturned removes the record of a function unless a call changes the function. If the
// removal fails, the next scan tries again.
func (b *Manager) forgetIfReturned(r *function) {
	lease, err := b.leaseRecord(r.Source)
	if err != nil {
		return
	}
	defer lease.Release()
	b.mu.Lock()
	same := b.functions[r.Address] == r
	b.mu.Unlock()
	if !same || !b.hasReturned(r) {
		return // the record changed before the lease
	}
	if b.config.isCurrent(r) {
		if override, err := b.changeUnder(lease).driverOverride(b.config.readFunction(r.Source), overrideReadLimit); err != nil || override != r.Override {
			return
		}
	}
	_ = b.changeRecord(r.unit, []string{r.Address})
}

// describeFunction returns the present description of a bound device. If a family describes the
// device too, its readings are included.
func (b *Manager) describeFunction(r *function, seen *discovery.Device) discovery.Device {
	d := r.Device
	d.Readings = nil
	if seen != nil {
		d.Readings = seen.Readings
	}
	b.mu.Lock()
	failed := b.failures[r.unit]
	b.mu.Unlock()
	d.Health = discovery.Health{Status: discovery.Healthy}
	switch {
	case failed != nil:
		d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound, Reason: failed.Error()}
	case b.config.readFunction(r.Source).Driver() == r.To:
		d, _ = pci.DescribePassthrough(b.config.Host, d) // an error appears in the health of the device
	}
	if d.Health.Status == discovery.Healthy && len(d.Readings) > 0 {
		d.Health = d.Readings[0]
	}
	return d
}
