package ondemand

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/overdue"
	"chandler.dev/internal/privilege"
)

// Configurer returns a configurer that creates missing devices and then calls the next one for the
// rest of the configuration. All other devices go to the next one directly.
func (m *Manager) Configurer(next discovery.Configurer) discovery.Configurer {
	return func(d discovery.Device, want discovery.Parameters, consumer string) (discovery.Device, discovery.Work, error) {
		if d.Creation == nil {
			return next(d, want, consumer)
		}
		if _, err := m.creatorFamily(d.Family); err != nil {
			return d, nil, fmt.Errorf("device %s: %w", d.Name, err)
		}
		return d, func(ctx context.Context) error {
			now, err := m.make(ctx, &d, consumer)
			if err != nil {
				return fmt.Errorf("device %s: it is not created: %w", d.Name, err)
			}
			_, work, err := next(now, want, consumer)
			if work == nil || err != nil {
				return err
			}
			return work(ctx)
		}, nil
	}
}

// make creates a device with its whole unit, and returns the device as a scan found it. It
// continues where an earlier call or agent has stopped.
func (m *Manager) make(ctx context.Context, d *discovery.Device, consumer string) (discovery.Device, error) {
	unit := d.Creation.Unit
	change := allocation.Change{
		Name: "unit " + unit, Consumer: consumer, API: discovery.ModeDRA, Functions: []discovery.DeviceKey{m.functionOf(d.Creation)}, OnEnd: m.config.Changed,
		Devices: []allocation.Hold{allocation.DeviceHold(d.Name, d.Silicon())}, // an overdue write outlasts the consumer
	}
	lease, err := m.config.Ledger.Leases.AwaitLease(ctx, change, m.config.Stock)
	if err != nil {
		return *d, err
	}
	defer m.begin(unit, lease)()
	if now, there := m.config.Device(d.Name); there && now.Creation == nil && checkPromised(d, &now) == nil {
		return now, nil // created together with another device of its unit
	}
	now, err := m.makeUnit(ctx, lease, d)
	m.mu.Lock()
	if err != nil && ctx.Err() == nil {
		m.failures[unit] = failure{err: err, parameters: d.Creation.How, at: time.Now()}
		time.AfterFunc(failureMemory, m.config.Changed) // no kernel event announces the end of the failure
	} else {
		delete(m.failures, unit)
	}
	m.mu.Unlock()
	return now, err
}

func (m *Manager) makeUnit(ctx context.Context, lease *ledger.Lease, d *discovery.Device) (discovery.Device, error) {
	f, err := m.creatorFamily(d.Family)
	if err != nil {
		return *d, err
	}
	unit := d.Creation.Unit
	m.setAwaited(unit, true)
	defer m.setAwaited(unit, false)
	work, err := m.planWork(lease, f.Create, f.Name, *d.Creation)
	if err != nil {
		return *d, err
	}
	if err := ctx.Err(); err != nil {
		return *d, fmt.Errorf("called off: %w", err) // from here on the work is not cancelled
	}
	if work != nil {
		if err := m.recordUnit(d); err != nil {
			return *d, err
		}
		if err := work(context.WithoutCancel(ctx)); err != nil {
			return *d, err
		}
	}
	m.config.Changed()
	return m.awaitPublished(ctx, d)
}

func (m *Manager) setAwaited(unit string, awaited bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if awaited {
		m.awaitingScan[unit] = true
	} else {
		delete(m.awaitingScan, unit)
	}
}

// settles is how long a created device may take to become healthy.
const settles = 2 * time.Second

// awaitPublished waits until the publishers of both APIs see the created device, and returns the
// device.
func (m *Manager) awaitPublished(ctx context.Context, d *discovery.Device) (now discovery.Device, err error) {
	var since time.Time
	var other error
	ok := m.until(ctx, func() bool {
		device, there := m.config.Device(d.Name)
		if !there || device.Creation != nil {
			return false
		}
		if other = checkPromised(d, &device); other != nil {
			return false
		}
		if since.IsZero() {
			since = time.Now()
		}
		now = device
		return now.Health.Status == discovery.Healthy || time.Since(since) > settles
	})
	switch {
	case !ok && other != nil:
		return *d, other
	case !ok && ctx.Err() != nil:
		return *d, fmt.Errorf("called off before it was seen: %w", ctx.Err())
	case !ok:
		return *d, fmt.Errorf("it did not appear within %s; the kernel's log may have the reason", m.config.Wait)
	}
	return now, nil
}

// identity lists the attributes that must agree between a created PCI device and the description of
// the missing device.
var identity = []resourceapi.QualifiedName{"pciVendor", "pciDevice", "function", "parent", deviceattribute.StandardDeviceAttributePCIBusID}

// checkPromised returns an error if the device with a name differs from the description of the
// missing device. The kernel may have put the created device elsewhere.
func checkPromised(d, now *discovery.Device) error {
	for _, name := range identity {
		if want, got := d.Attributes.String(name), now.Attributes.String(name); want != "" && got != want {
			return fmt.Errorf("another device is there in its place: its %s is %q and not %q", name, got, want)
		}
	}
	return nil
}

// repeatInterval is the interval of scans while the Manager waits for a change, because kernel
// events may be missing.
const repeatInterval = time.Second

// until waits for a condition and reports whether the condition became true in time.
func (m *Manager) until(ctx context.Context, so func() bool) bool {
	limit, looked := time.Now().Add(m.config.Wait), time.Now()
	for !so() {
		if time.Since(looked) > repeatInterval {
			m.config.Changed()
			looked = time.Now()
		}
		if time.Now().After(limit) {
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(20 * time.Millisecond):
		}
	}
	return true
}

// RemoveUnit removes a unit. It returns [*exclusion.Blocked] if a consumer, or another change, has one
// of its devices. A missing unit is not an error, nor is a unit that another program has changed: in
// both cases removed is false, and only the record is removed.
func (m *Manager) RemoveUnit(ctx context.Context, unit string) (removed bool, err error) {
	r := m.journal.Get(unit)
	if r == nil {
		return false, nil
	}
	lease, devices, blocked := m.leaseUnit(r)
	if blocked != nil {
		return false, blocked
	}
	defer m.begin(unit, lease)()
	if m.journal.Get(unit) != r {
		return false, nil // another call has changed the unit before the lease
	}
	if !m.isCurrent(r) {
		m.config.Changed()
		return false, m.removeRecord(unit) // the created devices disappeared together with the earlier function
	}
	removed, err = m.removeUnit(ctx, lease, r, devices)
	if err == nil {
		return removed, m.removeRecord(unit)
	}
	err = fmt.Errorf("it is not undone: %w", err)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failures[unit] = failure{err: err, afterCreation: true, at: time.Now()}
	return false, err
}

// leaseUnit returns a lease on all devices of a unit, with their names. If the publishers offer another
// device of the unit by the time the lease has begun, a consumer may already have that device, so
// leaseUnit begins again.
func (m *Manager) leaseUnit(r *record) (*ledger.Lease, []string, *exclusion.Blocked) {
	stock := m.config.Stock()
	devices := unitDevices(r, stock)
	for {
		c := allocation.Change{Name: "unit " + r.Group, API: discovery.ModeDRA, Functions: []discovery.DeviceKey{m.functionOf(&r.Body.Creation)}, OnEnd: m.config.Changed}
		for _, device := range devices {
			c.Devices = append(c.Devices, allocation.DeviceHold(device, r.Silicon))
		}
		lease, blocked := m.config.Ledger.Leases.LeaseDevices(c, stock)
		if blocked != nil {
			return nil, nil, blocked
		}
		stock = m.config.Stock()
		now := union(devices, unitDevices(r, stock))
		if len(now) == len(devices) {
			return lease, devices, nil
		}
		lease.Release()
		devices = now
	}
}

// removeUnit reports whether there was something to remove.
func (m *Manager) removeUnit(ctx context.Context, lease *ledger.Lease, r *record, devices []string) (removed bool, err error) {
	f, err := m.creatorFamily(r.Body.Family)
	if err != nil {
		return false, err
	}
	work, err := m.planWork(lease, f.Remove, f.Name, r.Body.Creation)
	if err != nil {
		return false, err
	}
	if work == nil { // nothing of the unit is there, or another program created what is there
		m.config.Changed()
		return false, nil
	}
	offered := func(name string) bool {
		d, known := m.config.Device(name)
		return known && d.Creation == nil
	}
	// Other devices of the unit appear only after the removal, such as the device that was divided.
	undone := slices.DeleteFunc(devices, func(name string) bool { return !offered(name) })
	if err := work(context.WithoutCancel(ctx)); err != nil {
		return false, err
	}
	m.config.Changed()
	// The publishers must see the removal before a consumer may have one of the devices.
	if !m.until(ctx, func() bool { return !slices.ContainsFunc(undone, offered) }) {
		return false, errors.New("its devices are there still")
	}
	return true, nil
}

// planWork calls the Create or Remove function of a family. If a driver blocks the call for too
// long, planWork returns an error and does no work.
func (m *Manager) planWork(lease *ledger.Lease, ask func(*discovery.Host, discovery.Tools, discovery.Creation) (discovery.Work, error), family string, of discovery.Creation) (work discovery.Work, err error) {
	var planned discovery.Work
	err = lease.Do(m.config.Limit, "a scan of /"+of.Of, func() (err error) {
		planned, err = ask(m.config.Host, m.changeTools(lease, family), of)
		return err
	})
	if errors.Is(err, overdue.Err) {
		return nil, err // the call is still running and may write to planned
	}
	return planned, err
}

// begin marks a unit as changing under a lease until end is called.
func (m *Manager) begin(unit string, lease *ledger.Lease) (end func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.inProgress[unit] = true
	return func() {
		m.mu.Lock()
		delete(m.inProgress, unit)
		m.mu.Unlock()
		lease.Release()
		m.config.Changed()
	}
}

var errNoPrivilege = privilege.Missing{Value: "onDemand.enabled", Page: "docs/on-demand-devices.md"}

// changeTools returns the tools for changes of a unit.
func (m *Manager) changeTools(lease *ledger.Lease, family string) discovery.Tools {
	return discovery.Tools{
		ChangePartition: m.runProgram(lease, family),
		Write:           func(name, value string) error { return m.set(lease, name, value) },
		AmendRecord:     m.amendRecord,
		RemoveRecord:    m.removeRecord,
		CheckBusy: func(keep bool, functions ...sysfs.Device) error {
			if m.config.Tools.CheckBusy == nil {
				return fmt.Errorf("%s: the agent cannot find out who uses functions of the host", functions[0].Name())
			}
			return m.config.Tools.CheckBusy(keep, functions...)
		},
	}
}

// runProgram returns the function that runs a family's program for a change, nil if the family has
// none.
func (m *Manager) runProgram(lease *ledger.Lease, family string) func(context.Context, discovery.PartitionChange) ([]byte, error) {
	program := m.config.Programs[family]
	if program == nil {
		return nil
	}
	return func(ctx context.Context, c discovery.PartitionChange) ([]byte, error) {
		output := make(chan []byte, 1)
		err := lease.Do(m.config.Limit+killTime, "a program for "+c.Function, func() error {
			text, err := program(ctx, c)
			output <- text
			return err
		})
		if err != nil {
			return nil, err
		}
		return <-output, nil
	}
}

// killTime is how long a program may take to end after it was killed at its own limit, which is a
// minute, like the limit of a write.
const killTime = 2 * time.Second

// set writes an attribute for a unit.
func (m *Manager) set(lease *ledger.Lease, name, value string) error {
	if m.config.Tools.Write == nil {
		return errNoPrivilege
	}
	what := fmt.Sprintf("write %q to /%s", value, name)
	err := lease.Do(m.config.Limit, what, func() error { return m.config.Tools.Write(name, value) })
	if err == nil || errors.Is(err, overdue.Err) {
		return err
	}
	return fmt.Errorf("%s: %w", what, errNoPrivilege.WrapReadOnly(err))
}
