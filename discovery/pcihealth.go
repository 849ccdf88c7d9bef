package discovery

import (
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"chandler.dev/discovery/sysfs"
)

// readPCI adds the readings of a PCI function's health to the devices that are
// the function, or a part of it. The family's own readings come first.
func readPCI(host *Host, devices []Device) {
	known := make(map[string][]Health) // by directory: partitions are of one function
	for i := range devices {
		d := &devices[i]
		function, ok := functionOf(sysfs.At(host.FS, d.Source))
		if !ok {
			continue
		}
		readings, read := known[function.Path]
		if !read {
			readings = pciReadings(host, function)
			known[function.Path] = readings
		}
		d.Readings = slices.Concat(d.Readings, readings)
	}
}

// functionOf returns the PCI function whose health is the device's: the device
// itself, or the function to which the "device" link of a class directory leads,
// such as that of infiniband/mlx5_0. A device that merely sits on a
// function, as a USB device on its controller, does not share its health.
func functionOf(d sysfs.Device) (sysfs.Device, bool) {
	if !sysfs.IsPCIAddress(d.Name()) {
		d, _ = d.LinkTo("device")
	}
	return d, sysfs.IsPCIAddress(d.Name())
}

// pciReadings returns what is wrong with a PCI function, present faults before
// past ones. It does not judge what it cannot read: a sensor that does not answer
// is no reason to doubt the device. It wakes no function that sleeps.
func pciReadings(host *Host, function sysfs.Device) []Health {
	var readings []Health
	add := func(condition Condition, reason string) {
		if reason != "" {
			readings = append(readings, Health{Status: Unhealthy, Condition: condition, Reason: reason})
		}
	}
	// Documentation/ABI/testing/sysfs-devices-power; a function without power
	// management is "unsupported".
	status, err := function.Text("power/runtime_status")
	if err != nil || status == "active" || status == "unsupported" {
		add(ConditionOverTemperature, tooHot(host, function))
		add(ConditionLinkDegraded, degraded(function))
	}
	add(ConditionFatalErrors, fatalErrors(function))
	return readings
}

// limitFile is that of the temperature at which a sensor's chip is in danger
// (Documentation/hwmon/sysfs-interface.rst).
var limitFile = regexp.MustCompile(`^temp[0-9]+_crit$`)

// tooHot returns which sensor of a function is as hot as its critical limit.
func tooHot(host *Host, function sysfs.Device) string {
	for _, hwmon := range function.Children("hwmon") {
		files, _ := fs.ReadDir(host.FS, hwmon.Path)
		for _, file := range files {
			if !limitFile.MatchString(file.Name()) {
				continue
			}
			attrs := hwmon.Attrs()
			limit, known := attrs.Int(file.Name()) // in thousandths of a degree
			now, read := attrs.Int(strings.TrimSuffix(file.Name(), "_crit") + "_input")
			if known && read && limit > 0 && now >= limit {
				return fmt.Sprintf("as hot as its critical limit of %d °C, or hotter", limit/1000)
			}
		}
	}
	return ""
}

// networkClass is what the class of network controllers begins with.
const networkClass = "02"

// degraded returns how the link of a function is less than it and the port above
// it can do (Documentation/ABI/testing/sysfs-bus-pci). The speed is judged of
// network controllers only: the kernel does not tell a link that was trained
// slowly from one that is slow because there is nothing to do, as that of idle
// GPUs and accelerators is.
func degraded(function sysfs.Device) string {
	port := function.Parent()
	if !sysfs.IsPCIAddress(port.Name()) {
		return ""
	}
	now, can, above := linkWidth(function, "current"), linkWidth(function, "max"), linkWidth(port, "max")
	if most := min(can, above); now > 0 && now < most {
		return fmt.Sprintf("its link has %d lanes of %d", now, most)
	}
	if id, err := function.PCIID(); err != nil || !strings.HasPrefix(id.Class, networkClass) {
		return ""
	}
	now, can, above = linkTransfers(function, "current"), linkTransfers(function, "max"), linkTransfers(port, "max")
	if most := min(can, above); now > 0 && now < most {
		return fmt.Sprintf("its link does %d MT/s of %d", now, most)
	}
	return ""
}

// linkWidth returns lanes, 0 if it is not known how many. The kernel writes 255
// where it does not know.
func linkWidth(d sysfs.Device, which string) int64 {
	width, ok := d.Attrs().Uint(which + "_link_width")
	if !ok || width > 32 {
		return 0
	}
	return int64(width)
}

// linkTransfers returns MT/s, 0 if it is not known how many.
func linkTransfers(d sysfs.Device, which string) int64 {
	speed, _ := d.Attrs().Text(which + "_link_speed")
	transfers, err := parseLinkSpeed(speed)
	if err != nil {
		return 0
	}
	return transfers
}

// fatalErrors returns how many fatal errors the kernel has counted since it
// found the function (Documentation/ABI/testing/sysfs-bus-pci-devices-aer).
func fatalErrors(function sysfs.Device) string {
	text, _ := function.Text("aer_dev_fatal")
	for line := range strings.Lines(text) {
		count, found := strings.CutPrefix(strings.TrimSpace(line), "TOTAL_ERR_FATAL ")
		if n, err := strconv.ParseUint(count, 10, 64); found && err == nil && n > 0 {
			return fmt.Sprintf("%d fatal PCIe errors", n)
		}
	}
	return ""
}
