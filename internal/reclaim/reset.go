package reclaim

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/privilege"
)

var errNoPrivilege = privilege.Missing{Value: "reclaim.enabled", Page: "docs/reclaim.md"}

// resetter resets the PCI functions of devices.
type resetter struct {
	config   *Config
	isClosed func() bool // no reset starts any more
}

// isPart reports whether a device is one of several on the same function, which cannot be reset
// alone. A virtual function is not such a part.
func isPart(d discovery.Device) bool {
	return d.PartOf != nil && len(d.PartOf.Counters) > 0 && d.Name != d.PartOf.Name
}

// reset resets the PCI function of a device without consumers. The kernel returns after the reset,
// notifies the driver before and after, and resets a bus only if no other device is on the bus
// (pci_reset_function and pci_parent_bus_reset in drivers/pci/pci.c).
func (t *resetter) reset(r *record, d discovery.Device, rule *Rule) error {
	function, ok := sysfs.At(t.config.Host.FS, d.Source).PCIFunction()
	if !ok {
		return errors.New("it belongs to no PCI function")
	}
	if s := t.config.Snapshot(); s != nil {
		for _, other := range s.Devices {
			if other.Silicon() != d.Silicon() && !other.Shareable && inuse.IsWithin(other.Source, function) {
				return fmt.Errorf("device %s is on the same function", other.Name)
			}
		}
	}
	switch {
	case !function.HasEntry("."):
		return nil // the function was removed
	case !function.HasEntry("reset"):
		return fmt.Errorf("the kernel has no way to reset function %s", function.Name())
	case t.config.Write == nil:
		return errNoPrivilege
	}
	key := discovery.FunctionKey(t.config.Host, function.Path)
	if !r.Device.MayEqual(key) { // the check for open files may have taken long
		return fmt.Errorf("the kernel has registered function %s again", function.Name())
	}
	stock := t.config.Stock()
	lease, blocked := t.config.Ledger.Leases.LeaseDevices(allocation.Change{
		Name: "reset of " + d.Name, Consumer: r.Key, Previous: r.Owner, API: r.Owner.API,
		Devices: exclusion.HoldsOn(stock, function.Path), Functions: []discovery.DeviceKey{key},
	}, stock)
	if blocked != nil {
		return blocked
	}
	defer lease.Release()
	if methods := strings.Join(rule.Methods, " "); methods != "" {
		now, err := function.Text("reset_method")
		if err != nil {
			return fmt.Errorf("function %s: which ways the kernel has: %w", function.Name(), err)
		}
		if now != methods {
			if err := t.write(function, "reset_method", methods); err != nil {
				return err
			}
		}
	}
	if err := t.write(function, "reset", "1"); err != nil && function.HasEntry(".") {
		return err // otherwise the function was removed, perhaps by the reset
	}
	return nil
}

func (t *resetter) write(function sysfs.Device, attribute, value string) error {
	if t.isClosed() {
		return errors.New("the agent ends")
	}
	if err := t.config.Write(path.Join(function.Path, attribute), value); err != nil {
		return fmt.Errorf("function %s: write %q to %s: %w", function.Name(), value, attribute, errNoPrivilege.WrapReadOnly(err))
	}
	return nil
}
