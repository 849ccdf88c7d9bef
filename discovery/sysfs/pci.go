package sysfs

import (
	"regexp"
	"strings"
)

// pciAddress is domain:bus:device.function. Domains of the VMD and Hyper-V
// bridges have more than four digits (drivers/pci/probe.c, "%04x").
var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)

// IsPCIAddress reports whether s is a PCI address as the kernel writes it,
// such as "0000:03:00.0".
func IsPCIAddress(s string) bool { return pciAddress.MatchString(s) }

// PCIFunction returns the PCI function that the device is or sits on: the
// deepest directory on its path that is named by a PCI address.
func (d Device) PCIFunction() (Device, bool) {
	for dir := d; strings.Contains(dir.Path, "/"); dir = dir.Parent() {
		if IsPCIAddress(dir.Name()) {
			return dir, true
		}
	}
	return Device{}, false
}

// PCIRoot returns the root complex above a device, such as "pci0000:00", or
// "" if its path does not name one.
func (d Device) PCIRoot() string {
	for element := range strings.SplitSeq(d.Path, "/") {
		if domainBus, ok := strings.CutPrefix(element, "pci"); ok && strings.Contains(domainBus, ":") {
			return element
		}
	}
	return ""
}
