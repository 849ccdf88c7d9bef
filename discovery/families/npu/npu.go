// Package npu describes the accelerators that the kernel's accel subsystem has
// nodes for, whoever made them: Intel's and AMD's NPUs, Qualcomm's Cloud AI
// cards, and those that it does not know, by what the kernel tells of any. It
// leaves alone what has a family of its own, and what has no accel node. The
// chips of one card, such as the four of a Cloud AI 100 Ultra, are devices of
// their own.
package npu

import (
	"cmp"
	"errors"
	"path"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Family is the accelerators of the accel subsystem.
var Family = &discovery.Family{
	Name:     "npu",
	Doc:      "Intel, AMD and Qualcomm NPUs, and others of the kernel's accel subsystem",
	Match:    []discovery.Match{{Class: "accel", Name: "accel[0-9]*"}},
	Describe: describe,
	Labels:   []discovery.Labels{{Where: map[string]string{"vendor": "intel"}, Set: map[string]string{"intel.feature.node.kubernetes.io/npu": "true"}}},
}

// drivers are what is known of accelerators by the driver. Intel's plugin goes
// by device IDs, and needs a release for each processor.
var drivers = map[string]struct{ vendor, resource string }{
	"amdxdna":   {"amd", ""},
	"intel_vpu": {"intel", "npu.intel.com/accel"},
	"qaic":      {"qualcomm", "qualcomm.com/qaic"},
}

// chips are what is known of accelerators by driver and PCI device ID. Intel's
// are told apart by generation, whose firmware and libraries differ
// (drivers/accel/ivpu/ivpu_drv.h); Qualcomm's have names (drivers/accel/qaic).
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

// elsewhere are the drivers whose accelerators are another family's.
var elsewhere = map[string]bool{"habanalabs": true}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	var parents []sysfs.Device
	minors := make(map[string][]sysfs.Device) // of one parent: qaic has had more than one
	for _, minor := range found {
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

// hardware returns the device that an accel node is for: the PCI function or
// platform device above it. A node without hardware above it is no accelerator.
func hardware(minor sysfs.Device) (sysfs.Device, bool) {
	parent := minor.Parent()
	if parent.Name() == "accel" {
		parent = parent.Parent()
	}
	physical := strings.HasPrefix(parent.Path, "sys/devices/") && !strings.HasPrefix(parent.Path+"/", "sys/devices/virtual/")
	return parent, physical
}

// isAccel reports whether a device is of the kernel's accel subsystem
// (drivers/accel/drm_accel.c). Google's driver for TPUs has a class of the same
// name.
func isAccel(minor sysfs.Device) bool {
	const major = 261 // ACCEL_MAJOR
	node, err := minor.Node("")
	return err == nil && node.Major == major || minor.Uevent()["DEVTYPE"] == "accel_minor"
}

func describeNPU(host *discovery.Host, parent sysfs.Device, minors []sysfs.Device) (discovery.Device, error) {
	d, err := discovery.Hardware(host, parent)
	errs := []error{err}
	driver := parent.Driver()
	d.Attributes.SetString("kind", "npu")
	d.Attributes.SetString("vendor", cmp.Or(drivers[driver].vendor, discovery.CompatibleVendor(parent)))
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
	d.Classic = []discovery.Offer{offer(driver, parent, minors[0])}
	d.Health = discovery.NodeHealth(host, d.Edits.DeviceNodes)
	return d, errors.Join(errs...)
}

// offer returns how the classic API sees an accelerator. The ID is that of the
// only share in Intel's plugin. Qualcomm does not publish its plugin's IDs, and
// no plugin offers the others, so these have the kernel's name of the device.
func offer(driver string, parent, minor sysfs.Device) discovery.Offer {
	resource := cmp.Or(drivers[driver].resource, discovery.AnyName)
	if driver == "intel_vpu" {
		stem := minor.Name() + "-"
		return discovery.Offer{Resource: resource, IDs: []string{stem + "0"}, Dialect: discovery.Dialect{Stem: stem}}
	}
	return discovery.Offer{Resource: resource, IDs: []string{parent.Name()}}
}
