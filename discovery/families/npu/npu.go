// Package npu describes accelerators with nodes of the kernel's accel subsystem: Intel and AMD
// NPUs, Qualcomm Cloud AI cards, and unknown accelerators of any vendor, by generic kernel
// attributes. It does not describe accelerators of other families, or accelerators without an accel
// node. The chips of one card, such as the four chips of a Cloud AI 100 Ultra, are separate
// devices.
package npu

import (
	"cmp"
	"errors"
	"maps"
	"path"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises the accelerators of the accel subsystem.
var Family = &discovery.Family{
	Name:     "npu",
	Doc:      "Intel, AMD and Qualcomm NPUs, and others of the kernel's accel subsystem",
	Match:    append([]discovery.Match{{Class: "accel", Name: "accel[0-9]*"}}, unbound()...),
	Describe: describe,
	Labels:   []discovery.Labels{{Where: map[string]string{"vendor": "intel"}, Set: map[string]string{"intel.feature.node.kubernetes.io/npu": "true"}}},
}

// drivers maps drivers to the vendor and the resource of their accelerators. The Intel plugin uses
// device IDs instead and needs a release for each processor.
var drivers = map[string]struct{ vendor, resource string }{
	"amdxdna":   {"amd", ""},
	"intel_vpu": {"intel", "npu.intel.com/accel"},
	"qaic":      {"qualcomm", "qualcomm.com/qaic"},
}

// chips maps driver and PCI device ID to the model and the architecture. The generations of Intel
// NPUs need different firmware and libraries (drivers/accel/ivpu/ivpu_drv.h); Qualcomm chips have
// names (drivers/accel/qaic).
var chips = map[string]struct{ model, architecture string }{
	"intel_vpu 643e": {"", "40xx"},
	"intel_vpu 7d1d": {"", "37xx"},
	"intel_vpu ad1d": {"", "37xx"},
	"intel_vpu b03e": {"", "50xx"},
	"intel_vpu fd3e": {"", "50xx"},
	"qaic a080":      {"AIC080", ""},
	"qaic a100":      {"AIC100", ""},
	"qaic a110":      {"AIC200", ""},
}

// functions lists the PCI functions of NPUs, by PCI vendor, so that an NPU without a driver is found
// too (the tables of drivers/accel/ivpu/ivpu_drv.c, drivers/accel/amdxdna/amdxdna_pci_drv.c and
// drivers/accel/qaic/qaic_drv.c).
var functions = map[string]struct {
	vendor  string
	devices []string
}{
	"8086": {"intel", []string{"643e", "7d1d", "ad1d", "b03e", "fd3e"}},
	"1022": {"amd", []string{"1502", "17f0"}},
	"17cb": {"qualcomm", []string{"a080", "a100", "a110"}},
}

func unbound() (matches []discovery.Match) {
	for _, vendor := range slices.Sorted(maps.Keys(functions)) {
		for _, device := range functions[vendor].devices {
			matches = append(matches, discovery.Match{Bus: "pci", Vendor: vendor, Device: device, Unbound: true})
		}
	}
	return matches
}

// elsewhere lists the drivers whose accelerators another family describes.
var elsewhere = map[string]bool{"habanalabs": true}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	var parents []sysfs.Device
	minors := make(map[string][]sysfs.Device) // by parent: a qaic device may have several accel minors
	for _, minor := range found {
		if sysfs.IsPCIAddress(minor.Name()) {
			d, err := pci.DescribeUnbound(host, minor, "npu", "")
			d.Attributes.SetString("vendor", functions[d.Attributes.String("pciVendor")].vendor)
			problems = append(problems, discovery.Problems(d.Name, err)...)
			devices = append(devices, d)
			continue
		}
		parent, ok := hardware(minor)
		if !ok || elsewhere[parent.Driver()] || !isAccel(minor) {
			continue
		}
		if minors[parent.Path] == nil {
			parents = append(parents, parent)
		}
		minors[parent.Path] = append(minors[parent.Path], minor)
	}
	for _, parent := range parents {
		d, err := describeNPU(host, parent, minors[parent.Path])
		if err != nil {
			problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
		}
		devices = append(devices, d)
	}
	return devices, problems
}

// hardware returns the device of an accel node: the PCI function or platform device above the node.
// A node without hardware is not an accelerator.
func hardware(minor sysfs.Device) (sysfs.Device, bool) {
	parent := minor.Parent()
	if parent.Name() == "accel" {
		parent = parent.Parent()
	}
	physical := strings.HasPrefix(parent.Path, "sys/devices/") && !strings.HasPrefix(parent.Path+"/", "sys/devices/virtual/")
	return parent, physical
}

// isAccel reports whether a device belongs to the kernel's accel subsystem
// (drivers/accel/drm_accel.c). Google's TPU driver has a class with the same name.
func isAccel(minor sysfs.Device) bool {
	const major = 261 // ACCEL_MAJOR
	node, err := minor.Node("")
	return err == nil && node.Major == major || minor.Uevent()["DEVTYPE"] == "accel_minor"
}

func describeNPU(host *discovery.Host, parent sysfs.Device, minors []sysfs.Device) (discovery.Device, error) {
	d, err := pci.DescribeHardware(host, parent)
	errs := []error{err}
	driver := parent.Driver()
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", cmp.Or(drivers[driver].vendor, pci.CompatibleVendor(parent)))
	chip := chips[driver+" "+d.Attributes.String("pciDevice")]
	d.Attributes.SetString("model", chip.model)
	d.Attributes.SetString("architecture", chip.architecture)
	attrs := parent.Attrs()
	if model, ok := attrs.Text("vbnv"); ok { // amdxdna
		d.Attributes.SetString("model", model)
	}
	errs = append(errs, attrs.Err())
	if version, err := host.ReadText(path.Join("/sys/module", driver, "version")); err == nil {
		d.Attributes.SetVersion("driverVersion", version)
	}
	for _, minor := range minors {
		node, err := discovery.Node(minor, "/dev/accel")
		d.Edits.DeviceNodes, errs = append(d.Edits.DeviceNodes, node), append(errs, err)
	}
	d.PluginOffers = []discovery.Offer{offer(driver, parent, minors[0])}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	return d, errors.Join(errs...)
}

// offer returns the offer of an accelerator in the device plugin API. For Intel, the ID is that of
// the only share in the Intel plugin. Qualcomm does not publish its plugin's IDs, and no plugin
// offers the others, so these use the kernel's device name.
func offer(driver string, parent, minor sysfs.Device) discovery.Offer {
	resource := cmp.Or(drivers[driver].resource, discovery.AnyName)
	if driver == "intel_vpu" {
		stem := minor.Name() + "-"
		return discovery.Offer{Resource: resource, IDs: []string{stem + "0"}, Dialect: discovery.Dialect{Stem: stem}}
	}
	return discovery.Offer{Resource: resource, IDs: []string{parent.Name()}}
}
