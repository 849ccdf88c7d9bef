package pci

import (
	"fmt"
	"strconv"
	"strings"

	"chandler.dev/discovery/sysfs"
)

// fatalErrors describes the kernel's count of fatal errors for a function, for the port above it,
// or at its root port (Documentation/ABI/testing/sysfs-bus-pci-devices-aer).
func (p *HealthReader) fatalErrors(function sysfs.Device) string {
	if n := countedErrors(function); n > 0 {
		return errorCount(n)
	}
	port := function.Parent()
	if !sysfs.IsPCIAddress(port.Name()) {
		return ""
	}
	if n := countedErrors(port); n > 0 {
		return fmt.Sprintf("%s of the port above it, %s", errorCount(n), port.Name())
	}
	root := port
	for sysfs.IsPCIAddress(root.Parent().Name()) {
		root = root.Parent()
	}
	if n := p.strayErrors(root); n > 0 {
		return fmt.Sprintf("%s below root port %s; the kernel does not say of which device", errorCount(n), root.Name())
	}
	return ""
}

func errorCount(n uint64) string {
	if n == 1 {
		return "1 fatal PCIe error"
	}
	return fmt.Sprintf("%d fatal PCIe errors", n)
}

// countedErrors returns the kernel's count of fatal errors for the function itself.
func countedErrors(function sysfs.Device) uint64 {
	text, _ := function.Text("aer_dev_fatal")
	for line := range strings.Lines(text) {
		count, found := strings.CutPrefix(strings.TrimSpace(line), "TOTAL_ERR_FATAL ")
		if n, err := strconv.ParseUint(count, 10, 64); found && err == nil {
			return n
		}
	}
	return 0
}

// strayErrors returns the number of fatal errors received by a root port and counted by no function
// below. Before 6.16 the kernel does not count a fatal error for its endpoint: after a fatal error
// the kernel does not read the details over the link, and counts only errors with details
// (aer_get_device_error_info, aer_print_error and pci_rootport_aer_stats_incr in
// drivers/pci/pcie/aer.c).
func (p *HealthReader) strayErrors(root sysfs.Device) uint64 {
	strays, read := p.strays[root.Path]
	if !read {
		if told, _ := root.Attrs().Uint("aer_rootport_total_err_fatal"); told > 0 {
			strays = told - min(told, errorsFrom(root))
		}
		p.strays[root.Path] = strays
	}
	return strays
}

// errorsFrom returns the fatal errors of a function and of all functions below it.
func errorsFrom(function sysfs.Device) uint64 {
	n := countedErrors(function)
	for _, below := range function.Children(".") {
		if sysfs.IsPCIAddress(below.Name()) {
			n += errorsFrom(below)
		}
	}
	return n
}
