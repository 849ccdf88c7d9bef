// Package slingshot describes HPE Slingshot adapters (Cassini) as the drivers of
// HewlettPackard/shs-cxi-driver show them in /sys. A container gets the device node of the adapter,
// and the network interface if the claim requests the interface. The libraries libcxi and libfabric
// come with the image. The package does not create virtual functions, or CXI services, which limit
// the use of an adapter.
package slingshot

import (
	"errors"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/network"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises Slingshot adapters.
var Family = &discovery.Family{
	Name: "slingshot",
	Doc:  "HPE Slingshot network adapters (Cassini) and their virtual functions",
	Match: []discovery.Match{
		{Bus: "pci", Driver: "cxi_ss1"},
		{Bus: "pci", Driver: "cxi_core"},                              // earlier releases
		{Bus: "pci", Vendor: "17db", Device: cassini1, Unbound: true}, // Cray
		{Bus: "pci", Vendor: "1590", Device: cassini2, Unbound: true}, // HPE
	},
	Describe:   describe,
	Grant:      network.GrantEdits,
	Parameters: []discovery.Parameter{network.InterfaceName},
	Accept:     network.Accept,
	FileDirs:   []string{network.InfoDir},
	Variables:  variables,
}

// PCI device IDs. Virtual functions have the ID of their physical function (cass_ids in
// cass_core.c).
const (
	cassini1 = "0501"
	cassini2 = "0371"
)

// architectures maps PCI device IDs to chips.
var architectures = map[string]string{cassini1: "cassini1", cassini2: "cassini2"}

// vendor is the vendor of all adapters. Cray, whose PCI vendor ID the first chips have, belongs to
// HPE.
const vendor = "hpe"

// variables tune the CXI provider of libfabric, according to fi_cxi(7) and the HPE documentation,
// and the cache of registered memory, according to fi_mr(3).
var variables = []string{
	"FI_CXI_DEFAULT_CQ_SIZE", "FI_CXI_DEFAULT_TX_SIZE", "FI_CXI_DISABLE_HOST_REGISTER", "FI_CXI_OFLOW_BUF_SIZE",
	"FI_CXI_RDZV_EAGER_SIZE", "FI_CXI_RDZV_GET_MIN", "FI_CXI_RDZV_PROTO", "FI_CXI_RDZV_THRESHOLD", "FI_CXI_REQ_BUF_SIZE", "FI_CXI_RX_MATCH_MODE",
	"FI_LOG_LEVEL", "FI_MR_CACHE_MONITOR",
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	routes, routesErr := network.ReadRoutes(host)
	for _, function := range found {
		if function.Driver() == "" {
			d, err := pci.DescribeUnbound(host, function, "nic", vendor)
			devices, problems = append(devices, d), append(problems, discovery.Problems(d.Name, err)...)
			continue
		}
		// Virtual functions hide the physical function.
		divided, sriovErr := pci.HasVirtualFunctions(function)
		if divided {
			continue
		}
		d, err := describeFunction(host, network.Function{
			Device: function, PCI: function, Interfaces: function.Children("net"), Routes: routes, RoutesErr: routesErr,
		})
		devices, problems = append(devices, d), append(problems, discovery.Problems(d.Name, errors.Join(err, sriovErr))...)
	}
	return devices, problems
}

// describeFunction describes a physical or virtual function with a driver.
func describeFunction(host *discovery.Host, f network.Function) (discovery.Device, error) {
	d, err := pci.DescribeFunction(host, f.PCI)
	errs := []error{err}
	d.Attributes.SetString("kind", "nic")
	d.Attributes.SetString("vendor", vendor)
	d.Attributes.SetString("architecture", architectures[d.Attributes.String("pciDevice")])
	errs = append(errs, setBoard(&d, f.PCI))
	physical := pci.PhysicalFunction(f.PCI)
	f.Port = network.ReadPort(host, physical, physical.Children("net"))
	errs = append(errs, f.DescribeFunction(&d, host))
	d.PluginOffers = nil
	for _, class := range f.PCI.Children("cxi_user") { // one, "cxi0"
		node, err := discovery.Node(class, "/dev")
		errs = append(errs, err)
		d.Edits.DeviceNodes = []*specs.DeviceNode{node}
		// As in HewlettPackard/cxi-k8s-device-plugin.
		d.PluginOffers = []discovery.Offer{{
			Resource: "beta.hpe.com/cxi", IDs: []string{strings.TrimPrefix(class.Name(), "cxi")}, NameAs: network.ResourceNameAttribute,
		}}
	}
	d.Health = f.Port.HealthOr(discovery.NodeHealth(host, d.Edits.DeviceNodes))
	return d, errors.Join(errs...)
}

// setBoard sets the values from the memory of the board, which only physical functions have. A
// board with two adapters has one serial number, and the driver numbers the adapters from 0.
func setBoard(d *discovery.Device, function sysfs.Device) error {
	attrs := function.Attrs()
	model, _ := attrs.Text("fru/description")
	d.Attributes.SetString("model", model)
	serial, _ := attrs.Text("fru/serial_number")
	d.Attributes.SetString("serial", serial)
	index, ok := attrs.Text("properties/uc_nic")
	if serial := d.Attributes.String("serial"); serial != "" && ok {
		d.Identity = serial + "/" + index
	}
	return attrs.Err()
}
