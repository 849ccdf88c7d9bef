// Package fpgaaws describes the FPGAs of Amazon F1 and F2 instances under the xdma driver of the
// AWS development kit. It does not load images or offer the functions for loading. It does not
// describe images with a vendor ID of their own, or FPGAs under XRT, which the fpga-xilinx family
// describes.
package fpgaaws

import (
	"errors"
	"regexp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises AWS FPGAs.
var Family = &discovery.Family{
	Name: "fpga-aws",
	Doc:  "FPGAs of AWS F1 and F2 instances under the xdma driver",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: "1d0f", Driver: "xdma"},
		{Bus: "pci", Vendor: "1d0f", Unbound: true},
	},
	Describe: describe,
}

// application matches the PCI device IDs of the functions for using an image: the IDs of an FPGA
// without an image (F1 and F2), and the IDs that Amazon allows for custom images. The functions
// that load images are 1041 and 9248.
var application = regexp.MustCompile(`^(1042|9048|f[0-9a-f]{3})$`)

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, function := range found {
		d, ours, err := describeFPGA(host, function)
		problems = append(problems, discovery.Problems(d.Name, err)...)
		if ours {
			devices = append(devices, d)
		}
	}
	return devices, problems
}

// describeFPGA describes the function for using an image of an FPGA. There is no common resource
// name: the AMD plugin has a name only for FPGAs under XRT, and the b<>com plugin counts units
// without detecting them.
func describeFPGA(host *discovery.Host, function sysfs.Device) (d discovery.Device, ours bool, err error) {
	d, err = pci.DescribeUnbound(host, function, "fpga", "aws")
	id := d.Attributes.String("pciDevice")
	switch {
	case !application.MatchString(id):
		if id != "" {
			err = nil // another function
		}
		return d, false, err
	case !function.HasDriver():
		return d, true, err
	}
	errs := []error{err}
	for _, channel := range function.Children("xdma") { // registers, events, and a node for each direction of a DMA channel
		node, err := discovery.Node(channel, "/dev")
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, node)
		errs = append(errs, err)
	}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	d.PluginOffers = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{function.Name()}}}
	return d, true, errors.Join(errs...)
}
