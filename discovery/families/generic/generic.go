// Package generic describes accelerators that no other family knows, by what
// the kernel tells of any: GPUs by their render nodes, co-processors and
// processing accelerators by the nodes that their driver has made. A device
// without such a node, as the screen of a server's management controller, is
// nothing that a container could use.
package generic

import (
	"errors"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family is what no other family knows. The PCI classes are display
// controllers, co-processors and processing accelerators (PCI Code and ID
// Assignment Specification 1.15); GPUs that are no PCI functions, as those of
// most ARM systems, are found by their render nodes.
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
		divided, sriovErr := discovery.Divided(kernel)
		if divided {
			continue // it is not given away under those who have its parts
		}
		d, offered, err := describeOne(host, kernel)
		if offered {
			devices = append(devices, d)
			problems = append(problems, discovery.Problems(d.Name, errors.Join(err, sriovErr))...)
		}
	}
	return devices, problems
}

// models are devices of virtual machines by their PCI IDs, as the PCI ID Repository names
// them.
var models = map[string]struct{ vendor, model string }{
	"1af4:1050": {"redhat", "Virtio 1.0 GPU"},
}

// isSoftware reports whether a DRM device is software that renders nothing, for
// tests of the kernel: vgem. It lies on the bus faux, and before Linux 6.15 on the
// bus platform without a driver (drivers/gpu/drm/vgem/vgem_drv.c). Hardware has its
// driver's nodes.
func isSoftware(kernel sysfs.Device) bool {
	return kernel.Link("subsystem") == "faux" || kernel.Driver() == ""
}

// describeOne returns the device that a PCI function or a platform device is,
// and whether there is anything for a container to open.
func describeOne(host *discovery.Host, kernel sysfs.Device) (discovery.Device, bool, error) {
	nodes, rendering := nodesOf(kernel)
	if len(nodes) == 0 {
		return discovery.Device{}, false, nil
	}
	d, err := discovery.Hardware(host, kernel)
	errs := []error{err}
	d.Attributes.SetString("vendor", discovery.CompatibleVendor(kernel))
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
	d.Classic = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{kernel.Name()}}}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	return d, true, errors.Join(errs...)
}

// others are classes of nodes that drivers of accelerators make besides, and
// that are for others: for virtual machines and user-space drivers, which other
// families hand out, and for the host itself.
var others = []string{"graphics", "i2c-dev", "uio", "vfio-dev"}

// nodesOf returns the kernel devices with a character device's node that lie
// right below a device, as mic/mic0 does, in path order, and whether one is a
// render node. Of the DRM's there are only nodes if one of them renders.
func nodesOf(kernel sysfs.Device) (nodes []sysfs.Device, rendering bool) {
	for _, class := range kernel.Children("") {
		if slices.Contains(others, class.Name()) {
			continue
		}
		var minors []sysfs.Device
		renders := false
		for _, minor := range class.Children("") {
			if !minor.Exists("dev") || minor.Link("subsystem") == "block" {
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

// directory is where a node lies that the kernel does not tell the place of.
func directory(minor sysfs.Device) string {
	if minor.Parent().Name() == "drm" {
		return "/dev/dri"
	}
	return "/dev"
}
