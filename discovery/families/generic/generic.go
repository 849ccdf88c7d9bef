// Package generic describes accelerators that no other family recognises, by generic kernel
// attributes: GPUs by their render nodes, co-processors and processing accelerators by the nodes of
// their driver. A device without such a node, such as the display of a server's management
// controller, is left out because a container could not use the device.
package generic

import (
	"errors"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises accelerators that no other family recognises. The PCI classes are display
// controllers, co-processors and processing accelerators (PCI Code and ID Assignment Specification
// 1.15). GPUs that are not PCI functions, as on most ARM systems, are found by their render nodes.
var Family = &discovery.Family{
	Name: "generic",
	Doc:  "GPUs, co-processors and processing accelerators that no other family knows",
	Match: []discovery.Match{
		{Bus: "pci", PCIClass: "03"},
		{Bus: "pci", PCIClass: "0b40"},
		{Bus: "pci", PCIClass: "12"},
		{Class: "drm", Name: "renderD[0-9]*"},
	},
	Leftovers: true,
	Unclaimed: true,
	Describe:  describe,
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	for _, kernel := range found {
		if strings.HasPrefix(kernel.Name(), "renderD") {
			if _, pci := kernel.PCIFunction(); pci || kernel.Parent().Name() != "drm" {
				continue
			}
			kernel = kernel.Parent().Parent()
			if isSoftware(kernel) {
				continue
			}
		}
		divided, sriovErr := pci.HasVirtualFunctions(kernel)
		if divided {
			continue // virtual functions hide the physical function
		}
		d, offered, err := describeOne(host, kernel)
		if offered {
			devices = append(devices, d)
			problems = append(problems, discovery.Problems(d.Name, errors.Join(err, sriovErr))...)
		}
	}
	return devices, problems
}

// models maps PCI IDs of virtual machine devices to their names in the PCI ID Repository.
var models = map[string]struct{ vendor, model string }{
	"1af4:1050": {"redhat", "Virtio 1.0 GPU"},
}

// isSoftware reports whether a DRM device is vgem, software for kernel tests that renders nothing.
// vgem is on the bus faux, and before Linux 6.15 on the bus platform without a driver
// (drivers/gpu/drm/vgem/vgem_drv.c). Hardware has the nodes of its driver.
func isSoftware(kernel sysfs.Device) bool {
	return kernel.Link("subsystem") == "faux" || kernel.Driver() == ""
}

// describeOne describes a PCI function or platform device. offered is false if the device has no
// nodes.
func describeOne(host *discovery.Host, kernel sysfs.Device) (discovery.Device, bool, error) {
	nodes, rendering := nodesOf(kernel)
	if len(nodes) == 0 {
		return discovery.Device{}, false, nil
	}
	d, err := pci.DescribeHardware(host, kernel)
	errs := []error{err}
	d.Attributes.SetString("vendor", pci.CompatibleVendor(kernel))
	if known, ok := models[d.Attributes.String("pciVendor")+":"+d.Attributes.String("pciDevice")]; ok {
		d.Attributes.SetString("vendor", known.vendor)
		d.Attributes.SetString("model", known.model)
	}
	d.Attributes.SetString("kind", "other")
	if rendering {
		d.Attributes.SetString("kind", "gpu")
	}
	for _, minor := range nodes {
		node, err := discovery.Node(minor, directory(minor))
		d.Edits.DeviceNodes, errs = append(d.Edits.DeviceNodes, node), append(errs, err)
	}
	d.PluginOffers = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{kernel.Name()}}}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	return d, true, errors.Join(errs...)
}

// others lists the classes of further nodes that accelerator drivers create: nodes for virtual
// machines and user-space drivers, which other families describe, and nodes for the host itself.
var others = []string{"graphics", "i2c-dev", "uio", "vfio-dev"}

// nodesOf returns the kernel devices with a character device node two levels below a device, such
// as mic/mic0, in path order, and whether one is a render node. DRM nodes are included only if one
// of them is a render node.
func nodesOf(kernel sysfs.Device) (nodes []sysfs.Device, rendering bool) {
	for _, class := range kernel.Children("") {
		if slices.Contains(others, class.Name()) {
			continue
		}
		var minors []sysfs.Device
		renders := false
		for _, minor := range class.Children("") {
			if !minor.HasEntry("dev") || minor.Link("subsystem") == "block" {
				continue
			}
			minors = append(minors, minor)
			renders = renders || strings.HasPrefix(minor.Name(), "renderD")
		}
		if class.Name() != "drm" || renders {
			nodes = append(nodes, minors...)
		}
		rendering = rendering || renders
	}
	return nodes, rendering
}

// directory is the directory of a node if the kernel does not report the path.
func directory(minor sysfs.Device) string {
	if minor.Parent().Name() == "drm" {
		return "/dev/dri"
	}
	return "/dev"
}
