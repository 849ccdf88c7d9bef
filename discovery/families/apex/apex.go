// Package apex describes Google Edge TPUs, as on Coral cards, as the apex driver of the gasket
// framework shows them in /sys. Edge TPUs on USB have no driver: the administrator lists them in
// the paths of the configuration.
//
// The attributes are those of drivers/staging/gasket of Linux 4.19 to 5.12, and of the same driver
// in google/gasket-driver since.
package apex

import (
	"errors"
	"fmt"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// The PCI ID of an Edge TPU belongs to Global Unichip (APEX_PCI_VENDOR_ID).
const (
	vendor = "1ac1"
	chip   = "089a"
)

// Family recognises Google Edge TPUs.
var Family = &discovery.Family{
	Name: "apex",
	Doc:  "Google's Edge TPUs, as on Coral's PCIe cards",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: vendor, Device: chip, Driver: "apex"},
		{Bus: "pci", Vendor: vendor, Device: chip, Unbound: true},
	},
	Describe: describe,
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, function := range found {
		d, err := describeChip(host, function)
		problems = append(problems, discovery.Problems(d.Name, err)...)
		devices = append(devices, d)
	}
	return devices, problems
}

func describeChip(host *discovery.Host, function sysfs.Device) (discovery.Device, error) {
	if function.Driver() == "" {
		return pci.DescribeUnbound(host, function, "npu", "google")
	}
	d, err := pci.DescribeFunction(host, function)
	errs := []error{err}
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", "google")
	d.Attributes.SetString("model", "Edge TPU")
	status := ""
	for _, minor := range function.Children("apex") { // one, "apex_0"
		node, err := discovery.Node(minor, "/dev")
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, node)
		// No plugin has its own resource name for Edge TPUs. Administrators configure the node in a
		// generic plugin.
		d.PluginOffers = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{minor.Name()}}}
		attrs := minor.Attrs()
		version, _ := attrs.Text("driver_version")
		d.Attributes.SetVersion("driverVersion", version)
		status, _ = attrs.Text("status")
		errs = append(errs, err, attrs.Err())
	}
	d.Health = health(status)
	if d.Health.Status == discovery.Healthy {
		d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	}
	return d, errors.Join(errs...)
}

// health returns the health for the driver's status of a chip (gasket_status_name_table in
// gasket_core.c).
func health(status string) discovery.Health {
	switch status {
	case "", "ALIVE":
		return discovery.Health{Status: discovery.Healthy}
	}
	return discovery.Health{Status: discovery.Unhealthy, Reason: fmt.Sprintf("the driver reports %.20q", status)}
}
