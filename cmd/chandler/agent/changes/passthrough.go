package changes

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/passthrough"
)

// EarlierPassthroughDir is the directory of the records of bound functions of earlier versions.
const EarlierPassthroughDir = "rebound"

// newPassthrough creates the [passthrough.Manager], which binds functions to vfio and returns them
// to their drivers.
func (c *Manager) newPassthrough() *passthrough.Manager {
	family := ""
	for _, f := range c.config.Families {
		if f.AllowsPassthrough {
			family = f.Name
		}
	}
	return passthrough.New(passthrough.Config{
		Host:  c.config.Host,
		Write: c.write,
		Busy:  func(functions ...sysfs.Device) error { return c.uses.checkUse(false, functions...) },

		Journal: c.config.Journal,
		Earlier: filepath.Join(c.config.StateDir, EarlierPassthroughDir),

		Family: family,
		Ledger: c.config.Ledger,
		Stock:  c.stock,
		Changed: func() {
			c.config.RequestScan()
			c.returns.checkSoon()
		},
	})
}

// CheckUnderVFIO returns an error if an extended resource requires a device under vfio, and the device
// has another driver.
func (c *Manager) CheckUnderVFIO(d *rules.Offered) error {
	driver := sysfs.At(c.config.Host.FS, d.Source).Driver()
	if d.Want[discovery.Driver] != discovery.DriverVFIO || discovery.IsVFIO(driver) {
		return nil
	}
	return fmt.Errorf("it is bound to %q and no longer to a vfio driver", driver)
}

// unitsToReturn lists the units under vfio. A unit may be returned to its drivers unless an extended
// resource wants it under vfio. Until its return, only requests for the present driver can get its
// devices. A device with an unreadable record is returned even if an extended resource wants the
// device: its own driver is needed to describe the device, and afterwards the device is bound to
// vfio again.
func (c *Manager) unitsToReturn() (units []undoable) {
	left, p := c.passthrough.LeftUnits(), c.config.Placed()
	var wanted map[string]bool
	if p != nil && len(left) > 0 {
		wanted = unitsUnderVFIO(p)
	}
	for _, l := range left {
		units = append(units, undoable{
			unit: l.Unit,
			stays: func() time.Duration {
				if p == nil || wanted[l.Unit] && !l.DriverUnknown {
					return RetryInterval
				}
				return 0
			},
			undo: func(ctx context.Context) error { return c.returnUnit(ctx, l) },
		})
	}
	return units
}

// returnUnit returns all functions of a unit to their drivers, unless a device of the unit has a
// consumer.
func (c *Manager) returnUnit(ctx context.Context, left passthrough.LeftUnit) error {
	var blocked *exclusion.Blocked
	switch err := c.passthrough.ReturnUnit(ctx, left.Unit); {
	case errors.As(err, &blocked):
		return nil
	case err != nil:
		return err
	}
	klog.FromContext(ctx).Info("Returned devices to their drivers", "devices", left.Devices)
	return nil
}

// unitsUnderVFIO returns the units that extended resources want under vfio.
func unitsUnderVFIO(p *placement.Placed) map[string]bool {
	wanted := make(map[string]bool)
	if p.IsLeaving {
		return wanted
	}
	for _, d := range p.Placement.ListedDevices(p.Snapshot.Devices) {
		if wantsVFIO(&d) {
			wanted[passthrough.UnitOf(&d.Device)] = true
		}
	}
	return wanted
}

func wantsVFIO(d *rules.Offered) bool {
	return d.Want[discovery.Driver] == discovery.DriverVFIO && len(d.Offers) > 0
}
