package network

import (
	"errors"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// UncreatedFunctions returns the virtual functions that could be created on a physical function
// with the given port: the result of [pci.UncreatedFunctions] with the attributes of
// network functions. The family has described the physical function with
// [Function.DescribeFunction], so the administrator can select it by its interface.
func UncreatedFunctions(host *discovery.Host, physical discovery.Device, port Port) ([]discovery.Device, error) {
	devices, err := pci.UncreatedFunctions(host, physical)
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
		d.Health = port.HealthOr(d.Health)
		function := sysfs.At(host.FS, d.Source)
		f := Function{Device: function, PCI: function, Port: port}
		errs = append(errs, f.DescribeFunction(d, host))
	}
	return devices, errors.Join(errs...)
}
