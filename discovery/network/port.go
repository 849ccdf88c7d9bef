package network

import (
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Port is a physical function with information about its virtual functions and sub-functions. The
// zero value is an unknown port, as in a virtual machine with one of the functions.
type Port struct {
	address      string
	name         string // of the port's interface, "" if unknown
	linkLayer    string
	down         bool             // the port is known to have no carrier
	indices      map[string]int64 // of virtual functions, by address
	representors map[part]string  // interfaces in the switch of the adapter
	acpiIndex    int64
	hasACPIIndex bool
	err          error
}

// part is a virtual function or sub-function of a physical function, by number.
type part struct {
	subfunction bool
	number      int64
}

// ReadPort reads a physical function. interfaces are the function's interfaces in the host's
// network namespace.
func ReadPort(host *discovery.Host, function sysfs.Device, interfaces []sysfs.Device) Port {
	p := Port{address: function.Name(), indices: make(map[string]int64), representors: make(map[part]string)}
	entries, err := fs.ReadDir(host.FS, function.Path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.err = fmt.Errorf("physical function %s: list virtual functions: %w", function.Name(), err)
	}
	for _, entry := range entries {
		digits, ok := strings.CutPrefix(entry.Name(), "virtfn")
		if index, err := strconv.ParseUint(digits, 10, 16); ok && err == nil {
			p.indices[function.Link(entry.Name())] = int64(index)
		}
	}
	attrs := function.Attrs()
	// See Documentation/ABI/testing/sysfs-bus-pci: the number that the firmware assigns to the
	// adapter's slot, as in the interface name "eno1".
	if index, ok := attrs.Uint("acpi_index"); ok && index <= 1<<32-1 {
		p.acpiIndex, p.hasACPIIndex = int64(index), true
	}
	p.err = errors.Join(p.err, attrs.Err())
	p.readInterfaces(interfaces)
	return p
}

func (p *Port) readInterfaces(interfaces []sysfs.Device) {
	for _, d := range interfaces {
		if name, err := d.Text("phys_port_name"); err == nil {
			if part, ok := representedBy(name); ok {
				p.representors[part] = d.Name()
			}
		}
	}
	uplink, ok := uplinkOf(interfaces)
	if !ok {
		return
	}
	var err error
	p.name = uplink.Name()
	p.linkLayer, err = linkLayer(uplink)
	p.err = errors.Join(p.err, err)
	// While the interface is down, reading the carrier fails, so the state of the port is unknown.
	carrier, err := uplink.Text("carrier")
	p.down = err == nil && carrier == "0"
}

// uplinkPort matches the name of a physical port, and partPort the name of a port of the switch in
// the adapter: "pf0vf1", "pf0sf88". Names for functions of another host begin with "c1"
// (Documentation/networking/switchdev.rst).
var (
	uplinkPort = regexp.MustCompile(`^p[0-9]+$`)
	partPort   = regexp.MustCompile(`^pf[0-9]+(vf|sf)([0-9]{1,9})$`)
)

// representedBy returns the virtual function or sub-function for the name of a switch port.
func representedBy(name string) (part, bool) {
	match := partPort.FindStringSubmatch(name)
	if match == nil {
		return part{}, false
	}
	number, err := strconv.ParseInt(match[2], 10, 64)
	return part{match[1] == "sf", number}, err == nil
}

// uplinkOf returns the interface of a physical function that leads out of the machine. The other
// interfaces may represent virtual functions and sub-functions.
func uplinkOf(interfaces []sysfs.Device) (sysfs.Device, bool) {
	if len(interfaces) == 1 {
		return interfaces[0], true
	}
	var uplinks []sysfs.Device
	for _, d := range interfaces {
		if name, err := d.Text("phys_port_name"); err == nil && uplinkPort.MatchString(name) {
			uplinks = append(uplinks, d)
		}
	}
	if len(uplinks) != 1 {
		return sysfs.Device{}, false
	}
	return uplinks[0], true
}

// linkLayer returns the link layer of an interface with the names of the kernel's InfiniBand core,
// "" for any other link layer (include/uapi/linux/if_arp.h).
func linkLayer(d sysfs.Device) (string, error) {
	attrs := d.Attrs()
	number, _ := attrs.Uint("type")
	if err := attrs.Err(); err != nil {
		return "", fmt.Errorf("interface %s: %w", d.Name(), err)
	}
	return map[uint64]string{1: "Ethernet", 32: "InfiniBand"}[number], nil
}

// HealthOr returns Unhealthy with the reason if the port is known to have no carrier, and otherwise
// the given health.
func (p Port) HealthOr(otherwise discovery.Health) discovery.Health {
	if p.down && otherwise.Status != discovery.Unhealthy {
		return discovery.Health{Status: discovery.Unhealthy, Reason: "port " + p.name + " has no carrier", Fix: "ip link show dev " + p.name + "   # then check the cable and the port of the switch"}
	}
	return otherwise
}
