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

// Port is a physical function, and what it says of its parts. Its zero value
// is one that is not known, as in a virtual machine that has a part of it.
type Port struct {
	address      string
	name         string // of its interface, "" if it is not known which one is
	linkLayer    string
	down         bool             // it is known to have no carrier
	indices      map[string]int64 // of virtual functions, by their addresses
	representors map[part]string  // interfaces in the switch of the adapter
	acpiIndex    int64
	hasACPIIndex bool
	err          error
}

// part is one of a physical function's, by its number.
type part struct {
	subfunction bool
	number      int64
}

// ReadPort reads a physical function, of which the interfaces are those in the
// host's network namespace.
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
	// Documentation/ABI/testing/sysfs-bus-pci: the number that the firmware
	// gave to the place of the adapter, as in the interface name "eno1".
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
	// While the interface is down, the kernel refuses to tell, which says
	// nothing of the port.
	carrier, err := uplink.Text("carrier")
	p.down = err == nil && carrier == "0"
}

// uplinkPort matches the name of a physical port, and partPort that of a port
// of the switch in the adapter: "pf0vf1", "pf0sf88". Those of another host's
// functions begin with "c1" (Documentation/networking/switchdev.rst).
var (
	uplinkPort = regexp.MustCompile(`^p[0-9]+$`)
	partPort   = regexp.MustCompile(`^pf[0-9]+(vf|sf)([0-9]{1,9})$`)
)

// representedBy returns the part whose port of the switch has that name.
func representedBy(name string) (part, bool) {
	match := partPort.FindStringSubmatch(name)
	if match == nil {
		return part{}, false
	}
	number, err := strconv.ParseInt(match[2], 10, 64)
	return part{match[1] == "sf", number}, err == nil
}

// uplinkOf returns the interface of a physical function that leads out of the
// machine: beside it may be those that represent its parts.
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

// linkLayer returns the link layer of an interface in the words of the kernel's
// InfiniBand core, "" if it is another (include/uapi/linux/if_arp.h).
func linkLayer(d sysfs.Device) (string, error) {
	attrs := d.Attrs()
	number, _ := attrs.Uint("type")
	if err := attrs.Err(); err != nil {
		return "", fmt.Errorf("interface %s: %w", d.Name(), err)
	}
	return map[uint64]string{1: "Ethernet", 32: "InfiniBand"}[number], nil
}

// Health returns Unhealthy with the reason if the port is known to have no
// carrier, and else what is given.
func (p Port) Health(otherwise discovery.Health) discovery.Health {
	if p.down && otherwise.Status != discovery.Unhealthy {
		return discovery.Health{Status: discovery.Unhealthy, Reason: "port " + p.name + " has no carrier"}
	}
	return otherwise
}
