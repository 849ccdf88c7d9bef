package pci

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// DescribeFunction returns the common description of a PCI function, which a family extends: its
// name, the attributes pciVendor, pciDevice, driver, function, parent, iommuGroup, linkSpeed and
// linkWidth, and the standard attributes pciBusID, pcieRoot and numaNode. A virtual function is
// part of its physical function. Missing values are left out; unreadable values are an error.
// DescribeFunction does not wake a suspended function. If reading the link would wake the function,
// DescribeFunction leaves out the link, and package scan keeps the values of the last scan.
func DescribeFunction(host *discovery.Host, function sysfs.Device) (discovery.Device, error) {
	attrs := function.Attrs()
	d := discovery.Device{
		Name:       discovery.DeviceName(function),
		Source:     function.Path,
		Attributes: discovery.Attributes{},
		Capacity:   discovery.Capacity{},
	}
	id, idErr := function.CheckedPCIID()
	d.Attributes.SetString("pciVendor", id.Vendor)
	d.Attributes.SetString("pciDevice", id.Device)
	d.Attributes.SetString("driver", function.Driver())
	d.Attributes.SetString("function", "physical")
	if physical := PhysicalFunction(function); physical.Path != function.Path {
		d.Attributes.SetString("function", "virtual")
		d.Attributes.SetString("parent", discovery.DeviceName(physical))
		d.PartOf = &discovery.Silicon{Name: discovery.DeviceName(physical)}
	}
	groupErr := setGroup(d.Attributes, function)
	var linkErr error
	if d.PartOf == nil && !function.WakesOnRead() {
		linkErr = SetLink(d.Attributes, function)
	}
	locationErr := setLocation(d.Attributes, function)
	if err := errors.Join(idErr, groupErr, attrs.Err(), linkErr, locationErr); err != nil {
		return d, fmt.Errorf("describe PCI function %s: %w", function.Name(), err)
	}
	return d, nil
}

// HasVirtualFunctions reports whether a PCI function has virtual functions. If so, the kernel links
// to the first one as virtfn0, and the physical function must not be assigned to a guest
// (Documentation/ABI/testing/sysfs-bus-pci). The error is that of looking up the link.
//
// The attribute sriov_numvfs has the same information. It is not read because sriov_numvfs_show in
// drivers/pci/iov.c waits for the device's lock, which a driver holds while it probes the device.
func HasVirtualFunctions(function sysfs.Device) (bool, error) { return function.Has("virtfn0") }

// linkSpeed matches "16.0 GT/s PCIe", and "8 GT/s" of older kernels.
var linkSpeed = regexp.MustCompile(`^([0-9]{1,3})(?:\.([0-9]))? GT/s(?: PCIe)?$`)

// DescribeHardware returns the common description of a hardware device: the result of
// [DescribeFunction] for a PCI function, and the name and driver for a device without a PCI
// address, such as a part of a system on a chip.
func DescribeHardware(host *discovery.Host, d sysfs.Device) (discovery.Device, error) {
	if sysfs.IsPCIAddress(d.Name()) {
		return DescribeFunction(host, d)
	}
	described := discovery.Device{Name: discovery.DeviceName(d), Source: d.Path, Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{}}
	described.Attributes.SetString("driver", d.Driver())
	return described, nil
}

// CompatibleVendor returns the vendor of a part of a system on a chip, from the first compatible
// string of the device tree: "rockchip" for "rockchip,rk3588-mali". The result is empty without
// such a string (Documentation/devicetree/bindings/vendor-prefixes.yaml).
func CompatibleVendor(d sysfs.Device) string {
	vendor, _, ok := strings.Cut(d.Uevent()["OF_COMPATIBLE_0"], ",")
	if !ok {
		return ""
	}
	return vendor
}

func setGroup(a discovery.Attributes, function sysfs.Device) error {
	group, ok, err := function.IOMMUGroup()
	if ok {
		a.SetInt("iommuGroup", group)
	}
	return err
}

// SetLink sets linkSpeed, in MT/s, and linkWidth, in lanes, to the maximum that the link of a
// physical function can reach: the smaller of the maxima of the function and of the port above it
// (Documentation/ABI/testing/sysfs-bus-pci). If the maximum of the port is not known, or the
// function is not below a port, the function's maximum is published.
//
// A link of unknown width gets no speed either. The current speed and width are not attributes,
// because GPUs and accelerators lower them while idle. A virtual function has no link: its link
// registers may hold any value.
func SetLink(a discovery.Attributes, function sysfs.Device) error {
	width, err := linkWidthOf(function, "max")
	if width == 0 {
		return err // all registers may read as ones, including the speed
	}
	speed, err := linkSpeedOf(function, "max")
	if port := function.Parent(); sysfs.IsPCIAddress(port.Name()) {
		portSpeed, _ := linkSpeedOf(port, "max")
		portWidth, _ := linkWidthOf(port, "max")
		speed, width = smallerKnown(speed, portSpeed), smallerKnown(width, portWidth)
	}
	a.SetInt("linkWidth", width)
	if speed > 0 {
		a.SetInt("linkSpeed", speed)
	}
	return err
}

// Link is a PCIe link at one moment.
type Link struct {
	Speed int64 // in MT/s, 0 if it is not known
	Width int64 // in lanes, 0 if it is not known
}

// CurrentLink returns the link of a device as it is at present. It returns nothing of a device
// without the attribute linkWidth, and of a suspended one, which the read would wake
// (current_link_speed_show in drivers/pci/pci-sysfs.c, Linux 6.12). A driver may delay it.
func CurrentLink(host *discovery.Host, d *discovery.Device) Link {
	function, ok := sysfs.At(host.FS, d.Source).PCIFunction()
	if _, has := d.Attributes["linkWidth"]; !has || !ok {
		return Link{}
	}
	if status, err := function.Text("power/runtime_status"); err == nil && status != "active" && status != "unsupported" {
		return Link{}
	}
	width, _ := linkWidthOf(function, "current")
	if width == 0 {
		return Link{} // all registers may read as ones, and the speed with them
	}
	published := d.Attributes["linkWidth"].IntValue
	if most, _ := linkWidthOf(function, "max"); most > 0 && published != nil && most < *published {
		return Link{} // the attributes have the link of a port above
	}
	speed, _ := linkSpeedOf(function, "current")
	return Link{Speed: speed, Width: width}
}

// smallerKnown returns the smaller of the maxima of a function and of the port above it.
// A maximum of 0 is not known. Without the function's maximum, the link's is not known.
func smallerKnown(function, port int64) int64 {
	if port == 0 {
		return function
	}
	return min(function, port)
}

// linkWidthOf returns the "current" or "max" width of a link in lanes, and 0 if the width
// is not known: the link is down (0), the function does not answer (63), or the kernel
// does not know the width (255, PCIE_LNK_WIDTH_UNKNOWN in include/linux/pci.h).
func linkWidthOf(d sysfs.Device, which string) (int64, error) {
	attrs, name := d.Attrs(), which+"_link_width"
	width, ok := attrs.Uint(name)
	if !ok {
		return 0, attrs.Err()
	}
	switch width {
	case 1, 2, 4, 8, 12, 16, 32:
		return int64(width), nil
	case 0, noLink, 255:
		return 0, nil
	}
	return 0, fmt.Errorf("attribute %s: no link has %d lanes", name, width)
}

// linkSpeedOf returns the "current" or "max" speed of a link in MT/s, and 0 if the speed
// is not known.
func linkSpeedOf(d sysfs.Device, which string) (int64, error) {
	attrs, name := d.Attrs(), which+"_link_speed"
	text, ok := attrs.RequiredText(name)
	if !ok {
		return 0, attrs.Err()
	}
	speed, ok := parseLinkSpeed(text)
	if !ok {
		return 0, fmt.Errorf("attribute %s: no speed: %.32q", name, text)
	}
	return speed, nil
}

// parseLinkSpeed returns a speed in MT/s, and 0 for "Unknown" and "Unknown speed", which
// the kernel writes if the link is down (pci_speed_string in drivers/pci/probe.c).
func parseLinkSpeed(text string) (speed int64, ok bool) {
	m := linkSpeed.FindStringSubmatch(text)
	if m == nil {
		return 0, text == "Unknown" || text == "Unknown speed"
	}
	whole, _ := strconv.ParseInt(m[1], 10, 64)
	tenths, _ := strconv.ParseInt(m[2], 10, 64) // "" is 0
	return 1000*whole + 100*tenths, true
}

// SetPlace sets the location of a kernel device below a PCI function, such as a USB device:
// pcieRoot and numaNode. Other devices get neither.
func SetPlace(a discovery.Attributes, d sysfs.Device) error {
	function, ok := d.PCIFunction()
	if !ok {
		return nil
	}
	if err := setPlace(a, function); err != nil {
		return fmt.Errorf("PCI function %s: %w", function.Name(), err)
	}
	return nil
}

// setLocation sets Kubernetes' own attributes, by its own helpers. The helpers reject PCI domains
// of more than four digits (KEP-4381 describes only "0000"). Longer domains are published in the
// same form.
func setLocation(a discovery.Attributes, function sysfs.Device) error {
	a.SetString(deviceattribute.StandardDeviceAttributePCIBusID, function.Name())
	return setPlace(a, function)
}

func setPlace(a discovery.Attributes, function sysfs.Device) error {
	a.SetString(deviceattribute.StandardDeviceAttributePCIeRoot, function.PCIRoot())
	node, ok, err := function.NUMANode()
	if !ok {
		return err
	}
	attribute, err := deviceattribute.GetNUMANodeAttribute(int(node), deviceattribute.ScalarAttribute)
	if err == nil {
		a[attribute.Name] = discovery.AttributeOf(attribute.Value)
	}
	return err
}

// IsIdleDriver reports whether a driver leaves its function unusable: no driver is bound, or a
// driver that only reserves the function. Such drivers are pci-stub, pci-pf-stub, which can also
// create virtual functions, and pciback of Xen (drivers/pci/pci-stub.c, drivers/pci/pci-pf-stub.c,
// drivers/xen/xen-pciback).
func IsIdleDriver(driver string) bool {
	return slices.Contains([]string{"", "pci-stub", "pci-pf-stub", "pciback"}, driver)
}

// UnboundHealth returns the health of a device without a driver.
func UnboundHealth() discovery.Health {
	return discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound, Reason: "no driver is bound to it"}
}

// DescribeUnbound describes a PCI function without a driver: it exists and is unusable.
func DescribeUnbound(host *discovery.Host, function sysfs.Device, kind, vendor string) (discovery.Device, error) {
	d, err := DescribeFunction(host, function)
	d.Attributes.SetString("kind", kind)
	d.Attributes.SetString("vendor", vendor)
	d.Health = UnboundHealth()
	return d, err
}

// ByClassDevices describes devices by their class devices, which need not be below a PCI function.
// It calls describe for each class device, with the found PCI functions by address, and
// [DescribeUnbound] for each PCI function without a driver. A function with a driver is described
// by its class device.
func ByClassDevices(host *discovery.Host, found []sysfs.Device, kind, vendor string, describe func(class sysfs.Device, functions map[string]sysfs.Device) (discovery.Device, error)) (devices []discovery.Device, problems []discovery.Problem) {
	functions := make(map[string]sysfs.Device)
	for _, d := range found {
		if sysfs.IsPCIAddress(d.Name()) {
			functions[d.Name()] = d
		}
	}
	for _, found := range found {
		var d discovery.Device
		var err error
		switch {
		case !sysfs.IsPCIAddress(found.Name()):
			d, err = describe(found, functions)
		case found.Driver() == "":
			d, err = DescribeUnbound(host, found, kind, vendor)
		default:
			continue
		}
		problems = append(problems, discovery.Problems(d.Name, err)...)
		devices = append(devices, d)
	}
	return devices, problems
}
