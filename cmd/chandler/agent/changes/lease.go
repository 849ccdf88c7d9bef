package changes

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// HostService is a [hostservice.Client].
type HostService interface {
	inuse.Finder

	// Write writes an attribute under a lease on a PCI function. It returns after the kernel has
	// ended the write.
	Write(lease string, function discovery.DeviceKey, name, value string) error

	// Configure gives a device the wanted parameters under a lease on its PCI function. It returns after
	// the change has ended.
	Configure(ctx context.Context, lease string, function discovery.DeviceKey, d *discovery.Device, want discovery.Parameters) error
}

// leaseGuard lets the agent change a PCI function only under a lease.
type leaseGuard struct {
	host    *discovery.Host
	leases  *ledger.Leases
	service HostService // changes devices instead of this process; nil if there is none
}

// requireLease returns a configurer whose work changes a device only under a lease, and by the host
// service if there is one. stock returns the devices of the host as both APIs offer them.
func (g leaseGuard) requireLease(configure discovery.Configurer, stock func() exclusion.Stock) discovery.Configurer {
	return func(d discovery.Device, want discovery.Parameters, consumer string) (discovery.Device, discovery.Work, error) {
		now, work, err := configure(d, want, consumer)
		if err != nil || work == nil {
			return now, work, err
		}
		change := allocation.Change{Name: d.Name + " configured", Consumer: consumer, API: discovery.ModeDRA, Devices: []allocation.Hold{allocation.DeviceHold(d.Name, d.Silicon())}}
		var key discovery.DeviceKey
		if function, ok := sysfs.At(g.host.FS, d.Source).PCIFunction(); ok {
			key = discovery.FunctionKey(g.host, function.Path)
			change.Functions = []discovery.DeviceKey{key}
		}
		if g.service != nil {
			work = func(ctx context.Context) error {
				lease := g.leases.LeaseOn(key)
				if lease == "" {
					return fmt.Errorf("configuration of device %s: %w", now.Name, ErrNoLease)
				}
				return g.service.Configure(ctx, lease, key, &now, want)
			}
		}
		return now, func(ctx context.Context) error {
			lease, err := g.leases.AwaitLease(ctx, change, stock)
			if err != nil {
				return fmt.Errorf("device %s: %w", d.Name, err)
			}
			defer lease.Release()
			return work(ctx)
		}, nil
	}
}

// ErrNoLease is the error of a write to a PCI function without a lease. Such a write is a defect of
// the agent, because a consumer may have the device.
var ErrNoLease = errors.New("no lease on the function")

// guardWrites returns the function that writes attributes of the host, by the host service if there
// is one, nil if the agent may not change the host. The function refuses each write to a PCI
// function without a lease, also if the kernel has registered the function again since the lease
// began.
func (g leaseGuard) guardWrites(write func(name, value string) error) func(name, value string) error {
	if write == nil && g.service == nil {
		return nil
	}
	return func(name, value string) error {
		function, lease := functionWritten(name, value), ""
		key := discovery.FunctionKey(g.host, function)
		if function != "" {
			if lease = g.leases.LeaseOn(key); lease == "" {
				return fmt.Errorf("write %q to /%s: function %s: %w", value, name, path.Base(function), ErrNoLease)
			}
		}
		if g.service != nil {
			return g.service.Write(lease, key, name, value)
		}
		return write(name, value)
	}
}

// guardPrograms returns programs of families for changes of devices, which run only under a lease on
// the PCI function that they change.
func (g leaseGuard) guardPrograms(programs map[string]func(context.Context, discovery.PartitionChange) ([]byte, error)) map[string]func(context.Context, discovery.PartitionChange) ([]byte, error) {
	guarded := make(map[string]func(context.Context, discovery.PartitionChange) ([]byte, error))
	for family, change := range programs {
		guarded[family] = func(ctx context.Context, c discovery.PartitionChange) ([]byte, error) {
			key := discovery.FunctionKey(g.host, "sys/bus/pci/devices/"+c.Function)
			lease := g.leases.LeaseOn(key)
			if lease == "" {
				return nil, fmt.Errorf("change of function %s: %w", c.Function, ErrNoLease)
			}
			return change(hostservice.WithLease(ctx, hostservice.Lease{Name: lease, Function: key}), c)
		}
	}
	return guarded
}

// functionWritten returns the directory of the PCI function that a write changes, "" if there is
// none. A write to a driver's bind and unbind, and to drivers_probe, names the function in its
// value (Documentation/ABI/testing/sysfs-bus-pci).
func functionWritten(name, value string) string {
	if strings.HasPrefix(name, "sys/bus/pci/") && !strings.HasPrefix(name, "sys/bus/pci/devices/") {
		return "sys/bus/pci/devices/" + strings.TrimSpace(value)
	}
	function, _ := sysfs.At(nil, name).PCIFunction()
	return function.Path
}
