package passthrough

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/overdue"
	"chandler.dev/internal/privilege"
)

// driverChange changes the drivers of functions under a lease. It has no records: each step reads
// the state of the kernel first.
type driverChange struct {
	config *Config
	lease  *ledger.Lease
}

func (b *Manager) changeUnder(lease *ledger.Lease) driverChange {
	return driverChange{config: &b.config, lease: lease}
}

var errNoPrivilege = privilege.Missing{Value: "passthrough.enabled", Page: "docs/vfio-passthrough.md"}

// mayTake returns why functions cannot be taken, nil if they can. All functions are checked before
// the first changes, and each again after its record is written: the disk and the writes to the
// earlier functions may have taken long.
func (c driverChange) mayTake(functions []string, to string) error {
	if c.config.Write == nil {
		return errNoPrivilege
	}
	if c.config.Busy == nil {
		return errors.New("the users of the host's functions are unknown")
	}
	if !c.isLoaded(to) {
		return fmt.Errorf("driver %s is not loaded (modprobe %s)", to, to)
	}
	var bound []sysfs.Device
	for _, source := range functions {
		function := c.config.readFunction(source)
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
	if err := c.config.Busy(bound...); err != nil {
		return fmt.Errorf("function %w", err)
	}
	return nil
}

// takeFunction binds one function to the vfio driver.
func (c driverChange) takeFunction(ctx context.Context, source, to string) error {
	function := c.config.readFunction(source)
	override, err := c.driverOverride(function, c.config.Limit)
	if err != nil {
		return err
	}
	address := function.Name()
	if err := c.mayTake([]string{source}, to); err != nil {
		return err
	}
	if override != to {
		if err := c.write(address, "set its driver", path.Join(source, "driver_override"), to); err != nil {
			return err
		}
	}
	return c.swap(ctx, source, to, func() error {
		return c.write(address, "bind it to "+to, "sys/bus/pci/drivers_probe", address)
	})
}

// swap unbinds a function from its present driver, unless that is the wanted driver, and binds the
// function.
func (c driverChange) swap(ctx context.Context, source, to string, bind func() error) error {
	address := path.Base(source)
	switch driver := c.config.readFunction(source).Driver(); driver {
	case to:
		return nil
	case "":
	default:
		if err := c.write(address, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), address); err != nil {
			return err
		}
	}
	return c.bind(ctx, source, to, bind)
}

// bind binds a function without a driver to a driver, and waits for the result.
func (c driverChange) bind(ctx context.Context, source, driver string, write func() error) error {
	address := filepath.Base(source)
	wrote := write()
	if c.lease.OverdueCall() != nil {
		return wrote
	}
	if wrote != nil && c.config.readFunction(source).Driver() != driver {
		return fmt.Errorf("driver %s did not take it: %w", driver, wrote)
	}
	return c.until(ctx, func() error {
		switch now := c.config.readFunction(source).Driver(); now {
		case driver:
			return nil
		case "":
			return fmt.Errorf("function %s: driver %s did not bind to it; the kernel's log may have the reason", address, driver)
		default:
			return fmt.Errorf("function %s: driver %s has it now and not %s", address, now, driver)
		}
	})
}

// awaitNodes returns when the nodes of a device under vfio can be opened, or with an error after a
// while.
func (c driverChange) awaitNodes(ctx context.Context, d discovery.Device) error {
	return c.until(ctx, func() error {
		now, err := pci.DescribePassthrough(c.config.Host, d)
		if err == nil && now.Health.Status != discovery.Healthy {
			err = errors.New(now.Health.Reason)
		}
		return err
	})
}

// until calls look until there is no error, and returns the last error after the time limit.
func (c driverChange) until(ctx context.Context, look func() error) error {
	limit := time.Now().Add(c.config.Wait)
	for {
		err := look()
		if err == nil || time.Now().After(limit) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// returnFunction returns a function to its recorded state. A function that was bound to another
// driver since stays with that driver.
func (c driverChange) returnFunction(ctx context.Context, r *function) error {
	function := c.config.readFunction(r.Source)
	if !function.HasEntry(".") || !c.config.isCurrent(r) {
		return nil // the function was removed, and a different function may have its address
	}
	driver := function.Driver()
	if r.Choose {
		return c.chooseDriver(r, driver)
	}
	if driver != "" && driver != r.To && driver != r.Driver {
		return nil
	}
	if driver == r.To && driver != r.Driver {
		if err := c.checkUnused(r); err != nil {
			return err
		}
	}
	if err := c.resetOverride(r); err != nil {
		return err
	}
	if driver == r.Driver {
		return nil
	}
	return c.giveDriver(ctx, r, driver)
}

// checkUnused returns an error if a visible process has a function open: the kernel would wait for
// that process, and keep the function locked meanwhile.
func (c driverChange) checkUnused(r *function) error {
	if c.config.Busy == nil {
		return nil
	}
	if err := c.config.Busy(c.config.readFunction(r.Source)); err != nil && !errors.Is(err, fs.ErrPermission) {
		return discovery.TransientError(fmt.Errorf("function %w", err))
	}
	return nil
}

// resetOverride restores the original driver_override of a function.
func (c driverChange) resetOverride(r *function) error {
	override, err := c.driverOverride(c.config.readFunction(r.Source), c.config.Limit)
	if err != nil || override == r.Override {
		return err
	}
	if c.config.Write == nil {
		return errNoPrivilege
	}
	return c.write(r.Address, "set its driver", path.Join(r.Source, "driver_override"), r.Override)
}

// chooseDriver makes the kernel choose the driver of a function whose original driver is unknown.
// If a driver other than vfio is bound already, that driver stays.
func (c driverChange) chooseDriver(r *function, driver string) error {
	own := driver != "" && !discovery.IsVFIO(driver)
	if !own {
		if err := c.checkUnused(r); err != nil {
			return err
		}
	}
	if err := c.resetOverride(r); err != nil {
		return err
	}
	if own {
		return nil
	}
	return c.probeDriver(r, driver)
}

// probeDriver unbinds a function and makes the kernel choose its driver.
func (c driverChange) probeDriver(r *function, driver string) error {
	if driver != "" {
		if err := c.write(r.Address, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), r.Address); err != nil {
			return err
		}
	}
	return c.write(r.Address, "have the kernel choose its driver", "sys/bus/pci/drivers_probe", r.Address)
}

// giveDriver binds a function to its original driver. If that driver is not loaded any more, the
// kernel chooses.
func (c driverChange) giveDriver(ctx context.Context, r *function, driver string) error {
	switch {
	case r.Driver == "":
		return c.write(r.Address, "unbind it from "+driver, path.Join(driverDir(driver), "unbind"), r.Address)
	case !c.isLoaded(r.Driver):
		return c.probeDriver(r, driver)
	}
	return c.swap(ctx, r.Source, r.Driver, func() error {
		return c.write(r.Address, "bind it to "+r.Driver, path.Join(driverDir(r.Driver), "bind"), r.Address)
	})
}

// describeNow returns the present state of a function. unread means that the function's record
// could not be read.
func (c driverChange) describeNow(source, to string, unread bool) (*function, error) {
	of := c.config.readFunction(source)
	driver := of.Driver()
	choose := unread && (driver == "" || discovery.IsVFIO(driver))
	override, err := c.driverOverride(of, c.config.Limit)
	if err != nil {
		return nil, err
	}
	if override == to && driver != to {
		override = "" // set by an agent whose record could not be read; with this override no other driver takes the function
	}
	if choose {
		driver, override = "", ""
	}
	return &function{Choose: choose, Address: of.Name(), Source: source, Driver: driver, Override: override, To: to, Key: discovery.FunctionKey(c.config.Host, source)}, nil
}

// driverOverride returns the driver_override of a function. The kernel may delay the read for as
// long as a process has the function open.
func (c driverChange) driverOverride(function sysfs.Device, limit time.Duration) (string, error) {
	var override string
	err := c.lease.Do(limit, "a read of its driver_override", func() (err error) {
		override, err = overrideOf(function)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("function %s: %w", function.Name(), err)
	}
	return override, nil
}

// write writes an attribute for a function.
func (c driverChange) write(address, what, name, value string) error {
	if c.config.Write == nil {
		return errNoPrivilege
	}
	err := c.lease.Do(c.config.Limit, what, func() error { return c.config.Write(name, value) })
	switch {
	case err == nil:
		return nil
	case errors.Is(err, overdue.Err):
		return fmt.Errorf("function %s: %w", address, err)
	}
	return fmt.Errorf("function %s: %s: write %q to /%s: %w", address, what, value, name, errNoPrivilege.WrapReadOnly(err))
}

// isLoaded reports whether the kernel has the PCI driver.
func (c driverChange) isLoaded(driver string) bool {
	return c.config.Host.FileExists("/" + driverDir(driver))
}

func driverDir(driver string) string { return "sys/bus/pci/drivers/" + driver }

// overrideOf returns the driver_override of a function, "" if not set. Only the driver with this
// name can bind to the function, regardless of the function's IDs
// (Documentation/ABI/testing/sysfs-bus-pci).
func overrideOf(function sysfs.Device) (string, error) {
	text, err := function.Text("driver_override")
	if text == "(null)" {
		text = ""
	}
	return text, err
}

func orNone(driver string) string {
	if driver == "" {
		return "no driver"
	}
	return "driver " + driver
}
