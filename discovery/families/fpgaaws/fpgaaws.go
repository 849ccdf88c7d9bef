// Package fpgaaws describes the FPGAs of Amazon's F1 and F2 instances under the
// xdma driver of AWS's development kit. It loads no image, gives away no function
// that does, and knows neither images that have a vendor ID of their own nor
// FPGAs under XRT, which are family fpga-xilinx's.
package fpgaaws

import (
	"errors"
	"regexp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family is the FPGAs of AWS.
var Family = &discovery.Family{
	Name: "fpga-aws",
	Doc:  "FPGAs of AWS F1 and F2 instances under the xdma driver",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: "1d0f", Driver: "xdma"},
		{Bus: "pci", Vendor: "1d0f", Unbound: true},
	},
	Describe: describe,
}

// application matches the PCI device IDs of the functions that an image is used
// through: those of an FPGA without one (F1 and F2), and those that Amazon lets
// makers of images choose from. The functions that load images are 1041 and 9248.
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

// describeFPGA describes the function of an FPGA that an image is used through.
// There is no name that everybody knows it by: AMD's plugin has one only for
// those under XRT, and b<>com's counts units that it does not look for.
func describeFPGA(host *discovery.Host, function sysfs.Device) (d discovery.Device, ours bool, err error) {
	d, err = discovery.Unbound(host, function, "fpga", "aws")
	id := d.Attributes.String("pciDevice")
	switch {
	case !application.MatchString(id):
		if id != "" {
			err = nil // it is another's
		}
		return d, false, err
	case !function.Bound():
		return d, true, err
	}
	errs := []error{err}
	for _, channel := range function.Children("xdma") { // registers, events, and a node for each direction of a DMA channel
		node, err := discovery.Node(channel, "/dev")
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, node)
		errs = append(errs, err)
	}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	d.Classic = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{function.Name()}}}
	return d, true, errors.Join(errs...)
}
