package network

import (
	"errors"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Unmade returns the virtual functions that a physical one, which sends through the port, could be
// given: [discovery.Host.Unmade] with what any network function has. The physical one is as its family
// describes it, with [Function.Describe], so that the administrator can tell it by its interface.
func Unmade(host *discovery.Host, physical discovery.Device, port Port) ([]discovery.Device, error) {
	devices, err := host.Unmade(physical)
	if err != nil {
		return nil, err
	}
	var errs []error
	for i := range devices {
		d := &devices[i]
		d.Attributes.SetString("kind", "nic")
		d.Attributes.SetString("vendor", physical.Attributes.String("vendor"))
		d.Attributes.SetString("linkLayer", physical.Attributes.String("linkLayer"))
		d.Attributes.SetInt("vfIndex", int64(i))
		d.Health = port.Health(d.Health)
		function := sysfs.At(host.FS, d.Source)
		f := Function{Device: function, PCI: function, Port: port}
		errs = append(errs, f.Describe(d, host))
	}
	return devices, errors.Join(errs...)
}
