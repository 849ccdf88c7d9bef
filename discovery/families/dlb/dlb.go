// Package dlb describes Intel Dynamic Load Balancers, physical and virtual functions, as the dlb2
// driver shows them in /sys. It does not partition devices or describe devices bound to another
// driver.
package dlb

import (
	"errors"
	"fmt"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises Intel Dynamic Load Balancers.
var Family = &discovery.Family{
	Name: "dlb",
	Doc:  "Intel Dynamic Load Balancers (DLB) and their virtual functions",
	Match: []discovery.Match{
		{Class: "dlb2", Name: "dlb*"},
		{Bus: "pci", Driver: "dlb2"}, // keeps other families from describing functions that are left out here
	},
	Describe: describe,
	Labels:   []discovery.Labels{{Where: map[string]string{"driver": "!"}, Set: map[string]string{"intel.feature.node.kubernetes.io/dlb": "true"}}},
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, class := range found {
		if sysfs.IsPCIAddress(class.Name()) {
			continue // described by its class device
		}
		function, ok := class.PCIFunction()
		if !ok {
			problems = append(problems, discovery.Problem{Device: discovery.DeviceName(class), Err: fmt.Errorf("%s: belongs to no PCI function", class.Path)})
			continue
		}
		// Virtual functions hide the physical function.
		divided, sriovErr := pci.HasVirtualFunctions(function)
		if divided {
			continue
		}
		d, err := describeFunction(host, function, class)
		if sriovErr == nil {
			d.PluginOffers = offers(&d, function.HasEntry("sriov_numvfs"))
		}
		if err := errors.Join(err, sriovErr); err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
	}
	return devices, problems
}

// describeFunction describes a function with the node of its class device.
func describeFunction(host *discovery.Host, function, class sysfs.Device) (discovery.Device, error) {
	d, err := pci.DescribeFunction(host, function)
	d.Attributes.SetString("kind", "other")
	d.Attributes.SetString("vendor", "intel")
	node, nodeErr := discovery.Node(class, "/dev")
	d.Edits.DeviceNodes = []*specs.DeviceNode{node}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	return d, errors.Join(err, nodeErr)
}

// offers returns the offer of the Intel plugin for the device: a function that can have virtual
// functions is a physical function. In a virtual machine there is no other sign.
func offers(d *discovery.Device, physical bool) []discovery.Offer {
	resource := "dlb.intel.com/pf"
	if !physical {
		resource = "dlb.intel.com/vf"
		d.Attributes.SetString("function", "virtual")
	}
	return []discovery.Offer{{Resource: resource, IDs: []string{d.Edits.DeviceNodes[0].Path}}}
}
