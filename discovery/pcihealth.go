package discovery

import (
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"

	"chandler.dev/discovery/sysfs"
)

// readPCI adds the readings of a PCI function's health to the devices that are
// the function, or a part of it. The family's own readings come first. It returns
// those of each function that it read, by directory.
func readPCI(host *Host, devices []Device) map[string][]Health {
	health := newPCIHealth(host)
	for i := range devices {
		d := &devices[i]
		if function, ok := functionOf(sysfs.At(host.FS, d.Source)); ok {
			d.Readings = slices.Concat(d.Readings, health.of(function))
		}
	}
	return health.known
}

// pciHealth reads the health of PCI functions, and of each of them once: partitions
// are of one function, and virtual functions have a physical one in common.
type pciHealth struct {
	host   *Host
	known  map[string][]Health // by directory
	strays map[string]uint64   // by root port; see strayErrors
}

func newPCIHealth(host *Host) pciHealth {
	return pciHealth{host: host, known: make(map[string][]Health), strays: make(map[string]uint64)}
}

// of returns what is wrong with a PCI function. A virtual function is a part of its
// physical one, which has the link, the sensors and the count of errors for both.
func (p pciHealth) of(function sysfs.Device) []Health {
	readings := p.alone(function)
	if failure := p.host.Recoveries.failure(function); failure != "" {
		readings = slices.Concat([]Health{{Status: Unhealthy, Reason: failure}}, readings)
	}
	physical := physicalOf(function)
	if physical.Path == function.Path {
		return readings
	}
	readings = slices.Clone(readings)
	for _, reading := range p.alone(physical) {
		if !slices.ContainsFunc(readings, func(own Health) bool { return own.Condition == reading.Condition }) {
			reading.Reason = fmt.Sprintf("its physical function %s: %s", physical.Name(), reading.Reason)
			readings = append(readings, reading)
		}
	}
	return readings
}

// alone returns what is wrong with a function by its own directory.
func (p pciHealth) alone(function sysfs.Device) []Health {
	readings, read := p.known[function.Path]
	if !read {
		readings = p.read(function)
		p.known[function.Path] = readings
	}
	return readings
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

// read returns what is wrong with a PCI function, present faults before past ones.
// It does not judge what it cannot read: a sensor that does not answer is no reason
// to doubt the device. It wakes no function that sleeps, and reads no file that
// takes the lock of a device.
func (p pciHealth) read(function sysfs.Device) []Health {
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
		add(ConditionNotResponding, silent(p.host, function))
		add(ConditionOverTemperature, tooHot(p.host, function))
		add(ConditionLinkDegraded, degraded(function))
	}
	add(ConditionFatalErrors, p.fatalErrors(function))
	return readings
}

// noLink is the width of a link whose status reads as all ones, as that of a function
// does which does not answer; no link has 63 lanes (PCI_EXP_LNKSTA_NLW in
// include/uapi/linux/pci_regs.h). Some virtual machines show it of functions that are
// well.
const noLink = 63

// headerSize is that of what any function has at the beginning of its configuration
// space, and all that users other than root may read of it.
const headerSize = 64

// silent returns how a function does not answer: all of the header of its
// configuration space reads as ones. The vendor alone would not do, since virtual
// functions that are well have ones there (section 3.4.1.1 of the SR-IOV
// specification). The kernel keeps readers waiting while it resets the function
// (pci_wait_cfg in drivers/pci/access.c), so a reset is not taken for silence.
func silent(host *Host, function sysfs.Device) string {
	if width, _ := function.Attrs().Uint("current_link_width"); width != noLink {
		return ""
	}
	file, err := host.FS.Open(path.Join(function.Path, "config"))
	if err != nil {
		return ""
	}
	defer file.Close()
	header := make([]byte, headerSize)
	if _, err := io.ReadFull(file, header); err != nil || slices.ContainsFunc(header, func(b byte) bool { return b != 0xff }) {
		return ""
	}
	return "it does not answer: its configuration space reads all ones"
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
	now, can, above := known(linkWidthOf(function, "current")), known(linkWidthOf(function, "max")), known(linkWidthOf(port, "max"))
	if most := min(can, above); now > 0 && now < most {
		return fmt.Sprintf("its link has %d lanes of %d", now, most)
	}
	if id, err := function.PCIID(); err != nil || !strings.HasPrefix(id.Class, networkClass) {
		return ""
	}
	now, can, above = known(linkSpeedOf(function, "current")), known(linkSpeedOf(function, "max")), known(linkSpeedOf(port, "max"))
	if most := min(can, above); now > 0 && now < most {
		return fmt.Sprintf("its link does %d MT/s of %d", now, most)
	}
	return ""
}

// known returns a width or speed of a link, and 0 also for one that cannot be read.
func known(value int64, _ error) int64 { return value }
