package pci

import (
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// HealthReader reads the health of each PCI function once: several partitions can share a function,
// and virtual functions share a physical function. Create it with [NewHealthReader].
type HealthReader struct {
	host    *discovery.Host
	known   map[string][]discovery.Health // by directory
	strays  map[string]uint64             // by root port; see strayErrors
	virtual map[string]string             // directory of the first virtual function, by directory of the physical function
	later   map[string]bool               // directories of all other virtual functions
}

// NewHealthReader returns a reader that has read nothing yet.
func NewHealthReader(host *discovery.Host) *HealthReader {
	return &HealthReader{host: host, known: make(map[string][]discovery.Health), strays: make(map[string]uint64), virtual: make(map[string]string), later: make(map[string]bool)}
}

// AddReadings adds the health readings of PCI functions to devices that are a function or its parts.
// The family's own readings come first.
func (p *HealthReader) AddReadings(devices []discovery.Device) {
	for i := range devices {
		d := &devices[i]
		if function, ok := FunctionOf(sysfs.At(p.host.FS, d.Source)); ok {
			d.Readings = slices.Concat(d.Readings, p.faultsOf(function))
		}
	}
}

// IsRepresented reports whether a file of sensors is in the directory of a virtual function that is
// not the first one of its physical function. At the intervals without events, the first one stands
// for all: they have one link, and one bit that enables all of them (VF Enable, section 3.3.3.1 of
// the SR-IOV specification). The kernel sends events about the recovery of each function from fatal
// errors (pci_uevent_ers in drivers/pci/pci-driver.c).
func (p *HealthReader) IsRepresented(name string) bool { return p.later[path.Dir(name)] }

// ComparedFaults returns the faults of the functions that were read, by directory, without the
// virtual functions of which [HealthReader.IsRepresented] reports true.
func (p *HealthReader) ComparedFaults() map[string][]discovery.Health {
	maps.DeleteFunc(p.known, func(function string, _ []discovery.Health) bool { return p.later[function] })
	return p.known
}

// faultsOf returns the faults of a PCI function. The faults of a virtual function include the
// faults of its physical function, which has the link, the sensors and the error counters of both.
func (p *HealthReader) faultsOf(function sysfs.Device) []discovery.Health {
	readings := p.OwnFaults(function)
	if p.host.RecoveryFailure != nil {
		if failure := p.host.RecoveryFailure(function); failure != "" {
			readings = slices.Concat([]discovery.Health{{Status: discovery.Unhealthy, Reason: failure}}, readings)
		}
	}
	physical := PhysicalFunction(function)
	if physical.Path == function.Path {
		return readings
	}
	if first, known := p.virtual[physical.Path]; !known {
		p.virtual[physical.Path] = function.Path
	} else if first != function.Path {
		p.later[function.Path] = true
	}
	readings = slices.Clone(readings)
	for _, reading := range p.OwnFaults(physical) {
		if !slices.ContainsFunc(readings, func(own discovery.Health) bool { return own.Condition == reading.Condition }) {
			reading.Reason = fmt.Sprintf("its physical function %s: %s", physical.Name(), reading.Reason)
			readings = append(readings, reading)
		}
	}
	return readings
}

// OwnFaults returns the faults in the function's own directory.
func (p *HealthReader) OwnFaults(function sysfs.Device) []discovery.Health {
	readings, read := p.known[function.Path]
	if !read {
		readings = p.read(function)
		p.known[function.Path] = readings
	}
	return readings
}

// FunctionOf returns the PCI function whose health the device has: the device itself, or the target
// of the "device" link of a class directory such as infiniband/mlx5_0. A device merely connected to
// a function, such as a USB device to its controller, does not share the function's health.
func FunctionOf(d sysfs.Device) (sysfs.Device, bool) {
	if !sysfs.IsPCIAddress(d.Name()) {
		d, _ = d.LinkTo("device")
	}
	return d, sysfs.IsPCIAddress(d.Name())
}

// read returns the faults of a PCI function, present faults before past ones. An unreadable value
// is not a fault: a silent sensor does not make the device unhealthy. read wakes no suspended
// function, and reads no file behind the device's lock.
func (p *HealthReader) read(function sysfs.Device) []discovery.Health {
	var readings []discovery.Health
	add := func(condition discovery.Condition, reason string) {
		if reason != "" {
			readings = append(readings, discovery.Health{Status: discovery.Unhealthy, Condition: condition, Reason: reason})
		}
	}
	// A function without power management has the status "unsupported"
	// (Documentation/ABI/testing/sysfs-devices-power). Reading the registers of a virtual
	// function resumes at most the port above the function, and the port is awake while the
	// physical function is (pci_config_pm_runtime_get in drivers/pci/pci.c). Reading a sensor
	// may resume the function itself.
	awake := PhysicalFunction(function)
	if len(function.Children("hwmon")) > 0 {
		awake = function
	}
	status, err := awake.Text("power/runtime_status")
	if err != nil || status == "active" || status == "unsupported" {
		add(discovery.ConditionNotResponding, noResponse(p.host, function))
		add(discovery.ConditionOverTemperature, tooHot(p.host, function))
		add(discovery.ConditionLinkDegraded, degradedLink(function))
	}
	add(discovery.ConditionFatalErrors, p.fatalErrors(function))
	return readings
}

// noLink is the width of a link whose status register reads as all ones because the function does
// not respond; no link has 63 lanes (PCI_EXP_LNKSTA_NLW in include/uapi/linux/pci_regs.h). Some
// virtual machines report this width for healthy functions.
const noLink = 63

// headerSize is the size of the configuration space header of every function. Users other than root
// can read no more.
const headerSize = 64

// noResponse describes how a function does not respond: the whole header of its configuration space
// reads as ones. The vendor ID alone is not enough, because healthy virtual functions have all ones
// there (section 3.4.1.1 of the SR-IOV specification). During a reset of the function the kernel
// blocks readers (pci_wait_cfg in drivers/pci/access.c), so a reset is not mistaken for a fault.
func noResponse(host *discovery.Host, function sysfs.Device) string {
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

// limitFile matches the file with the critical temperature of a sensor's chip
// (Documentation/hwmon/sysfs-interface.rst).
var limitFile = regexp.MustCompile(`^temp[0-9]+_crit$`)

// tooHot describes a function's first sensor at or above its critical limit.
func tooHot(host *discovery.Host, function sysfs.Device) string {
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

// networkClass is the PCI base class of network controllers.
const networkClass = "02"

// degradedLink describes how the link of a function is below the maximum of the function and of the
// port above it (Documentation/ABI/testing/sysfs-bus-pci). The speed is checked only for network
// controllers: the kernel does not distinguish a link trained at a low speed from a link slowed
// down by an idle GPU or accelerator.
func degradedLink(function sysfs.Device) string {
	port := function.Parent()
	if !sysfs.IsPCIAddress(port.Name()) {
		return ""
	}
	now, can, above := knownOrZero(linkWidthOf(function, "current")), knownOrZero(linkWidthOf(function, "max")), knownOrZero(linkWidthOf(port, "max"))
	if most := min(can, above); now > 0 && now < most {
		return fmt.Sprintf("its link has %d lanes of %d", now, most)
	}
	if id, err := function.PCIID(); err != nil || !strings.HasPrefix(id.Class, networkClass) {
		return ""
	}
	now, can, above = knownOrZero(linkSpeedOf(function, "current")), knownOrZero(linkSpeedOf(function, "max")), knownOrZero(linkSpeedOf(port, "max"))
	if most := min(can, above); now > 0 && now < most {
		return fmt.Sprintf("its link does %d MT/s of %d", now, most)
	}
	return ""
}

// knownOrZero returns the width or speed of a link, and 0 if unreadable.
func knownOrZero(value int64, _ error) int64 { return value }

// PhysicalFunction returns the physical function of a virtual one, and any other function itself.
func PhysicalFunction(function sysfs.Device) sysfs.Device {
	if physical, ok := function.LinkTo("physfn"); ok && sysfs.IsPCIAddress(physical.Name()) {
		return physical
	}
	return function
}
