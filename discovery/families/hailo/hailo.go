// Package hailo describes Hailo PCIe accelerators as the hailo_pci driver of
// hailo-ai/hailort-drivers shows them in /sys. The Raspberry Pi kernel contains a copy
// (drivers/media/pci/hailo). Only the firmware identifies the card of a chip.
package hailo

import (
	"errors"
	"fmt"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

const vendor = "1e60"

// Family recognises Hailo accelerators.
var Family = &discovery.Family{
	Name: "hailo",
	Doc:  "Hailo's accelerators on PCIe, Hailo-8 and later",
	Match: []discovery.Match{
		{Class: "hailo_chardev", Name: "hailo[0-9]*"},
		{Bus: "pci", Vendor: vendor, Driver: "hailo"},
		{Bus: "pci", Vendor: vendor, Unbound: true},
	},
	Describe: describe,
}

// architectures maps PCI device IDs to chips (PCI_DEVICE_ID_HAILO_HAILO8 and others in the driver's
// sources). A Hailo-8L has the ID of a Hailo-8.
var architectures = map[string]string{"2864": "hailo8", "45c4": "hailo10h", "43a2": "hailo15l"}

func describe(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
	version, _ := host.ReadText("/sys/module/hailo_pci/version")
	return pci.ByClassDevices(host, found, "npu", "hailo", func(class sysfs.Device, functions map[string]sysfs.Device) (discovery.Device, error) {
		d, err := describeChip(host, class, functions)
		d.Attributes.SetVersion("driverVersion", version)
		return d, err
	})
}

// describeChip describes a chip by its class device. In older drivers the class device is not below
// the PCI function, and the attribute board_location contains the address of the function.
func describeChip(host *discovery.Host, class sysfs.Device, functions map[string]sysfs.Device) (discovery.Device, error) {
	d := discovery.Device{Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{}}
	attrs := class.Attrs()
	location, _ := attrs.Text("board_location")
	function, known := class.PCIFunction()
	if !known {
		function, known = functions[location]
	}
	var err error
	switch {
	case known:
		d, err = pci.DescribeFunction(host, function)
		d.Attributes.SetString("architecture", architectures[d.Attributes.String("pciDevice")])
		d.Includes = []string{function.Path}
	case location != "":
		err = fmt.Errorf("attribute board_location: not a Hailo PCI function: %.32q", location)
	}
	// The name does not depend on the location, which some drivers do not report.
	d.Name, d.Source = discovery.DeviceName(class), class.Path
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", "hailo")
	node, nodeErr := discovery.Node(class, "/dev")
	d.Edits.DeviceNodes = []*specs.DeviceNode{node}
	d.PluginOffers = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{class.Name()}}}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	return d, errors.Join(err, attrs.Err(), nodeErr)
}
