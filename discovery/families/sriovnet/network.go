package sriovnet

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// port is what a physical function says of its parts.
type port struct {
	name      string // of its interface, "" if it is not known which one is
	linkLayer string
	down      bool             // it is known to have no carrier
	indices   map[string]int64 // of virtual functions, by their addresses
	err       error
}

// readPort reads the physical function. The unit is what is known of its
// interfaces, nil if nothing is.
func readPort(host *discovery.Host, function sysfs.Device, u *unit) port {
	p := port{indices: make(map[string]int64)}
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
	if u == nil {
		return p
	}
	if uplink, ok := uplinkOf(u.interfaces); ok {
		p.name = uplink.Name()
		p.linkLayer, err = linkLayer(uplink)
		p.err = errors.Join(p.err, err)
		// While the interface is down, the kernel refuses to tell, which says
		// nothing of the port.
		carrier, err := uplink.Text("carrier")
		p.down = err == nil && carrier == "0"
	}
	return p
}

// uplinkPort matches the name of a physical port, and not that of a port of the
// switch in the adapter, as "pf0vf1" (Documentation/networking/switchdev.rst).
var uplinkPort = regexp.MustCompile(`^p[0-9]+$`)

// uplinkOf returns the interface of a physical function that leads out of the
// machine: beside it may be those that represent virtual functions.
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

// routes are the interfaces that have a default route of the host.
type routes map[string]bool

// maxRoutes bounds what is read of a routing table, in bytes. A route is 128 of
// them, or 150.
const maxRoutes = 4 << 20

// readRoutes reads the routing tables of the host's first process: /proc/net
// is of the network namespace of the process that reads it. A kernel may have
// no IPv4 or no IPv6, but a node has one of them.
func readRoutes(host *discovery.Host) (routes, error) {
	found := make(routes)
	err4 := found.read(host, "proc/1/net/route", found.addLine)
	err6 := found.read(host, "proc/1/net/ipv6_route", found.addLine6)
	switch missing4, missing6 := errors.Is(err4, fs.ErrNotExist), errors.Is(err6, fs.ErrNotExist); {
	case missing4 && !missing6:
		err4 = nil
	case missing6 && !missing4:
		err6 = nil
	}
	return found, errors.Join(err4, err6)
}

func (r routes) read(host *discovery.Host, name string, add func(fields []string) bool) error {
	text, err := sysfs.ReadText(host.FS, name, maxRoutes)
	if err != nil {
		return fmt.Errorf("default routes: %w", err)
	}
	for line := range strings.Lines(text) {
		if !add(strings.Fields(line)) {
			return fmt.Errorf("default routes: %s: no route: %.64q", path.Base(name), line)
		}
	}
	return nil
}

// addLine adds the interface of a default route in a line such as
// "eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0": interface, destination,
// gateway, flags, three numbers, mask. It reports whether the line is a route.
func (r routes) addLine(fields []string) bool {
	if len(fields) < 8 {
		return false
	}
	if fields[1] == "00000000" && fields[7] == "00000000" {
		r[fields[0]] = true
	}
	return true
}

// addLine6 does so for a line of ten fields: destination and length of its
// prefix, the same of the source, next hop, four numbers, interface.
func (r routes) addLine6(fields []string) bool {
	if len(fields) != 10 {
		return false
	}
	if strings.Trim(fields[0]+fields[1], "0") == "" {
		r[fields[9]] = true
	}
	return true
}

// maxStack bounds how many interfaces lie above one another: a VLAN on a bridge
// on a bond. The kernel's bound is 8 (MAX_NEST_DEV).
const maxStack = 8

// leadThrough reports whether a default route leads through one of the
// interfaces, by itself or by a bond, bridge or VLAN above it.
func (r routes) leadThrough(host *discovery.Host, interfaces []sysfs.Device) bool {
	if len(r) == 0 {
		return false
	}
	for _, d := range interfaces {
		if r.leadAbove(host, d.Name(), maxStack) {
			return true
		}
	}
	return false
}

func (r routes) leadAbove(host *discovery.Host, name string, above int) bool {
	if r[name] {
		return true
	}
	entries, err := fs.ReadDir(host.FS, path.Join("sys/class/net", name))
	if err != nil || above == 0 {
		return false
	}
	for _, entry := range entries {
		if upper, ok := strings.CutPrefix(entry.Name(), "upper_"); ok && r.leadAbove(host, upper, above-1) {
			return true
		}
	}
	return false
}
