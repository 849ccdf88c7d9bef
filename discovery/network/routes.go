package network

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Routes is the set of interfaces with a default route of the host.
type Routes map[string]bool

// maxRoutes limits the size of a routing table, in bytes. A route takes 128 or 150 bytes.
const maxRoutes = 4 << 20

// ReadRoutes reads the routing tables of the host's first process, because /proc/net shows the
// network namespace of the reading process. A kernel may lack IPv4 or IPv6, but a node has at least
// one of them.
func ReadRoutes(host *discovery.Host) (Routes, error) {
	found := make(Routes)
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

func (r Routes) read(host *discovery.Host, name string, add func(fields []string) bool) error {
	text, err := sysfs.ReadText(host.FS, name, maxRoutes)
	if err != nil {
		return fmt.Errorf("default routes: %w", err)
	}
	for line := range strings.Lines(text) {
		if !add(strings.Fields(line)) {
			return fmt.Errorf("default routes: %s: not a route: %.64q", path.Base(name), line)
		}
	}
	return nil
}

// addLine adds the interface of a default route from a line such as "eth0 00000000 0101A8C0 0003 0
// 0 100 00000000 0 0 0": interface, destination, gateway, flags, three numbers, mask. It reports
// whether the line is a route.
func (r Routes) addLine(fields []string) bool {
	if len(fields) < 8 {
		return false
	}
	if fields[1] == "00000000" && fields[7] == "00000000" {
		r[fields[0]] = true
	}
	return true
}

// addLine6 does the same for an IPv6 line with ten fields: destination and prefix length, source
// and prefix length, next hop, four numbers, interface.
func (r Routes) addLine6(fields []string) bool {
	if len(fields) != 10 {
		return false
	}
	if strings.Trim(fields[0]+fields[1], "0") == "" {
		r[fields[9]] = true
	}
	return true
}

// maxStack limits how many interfaces are stacked, such as a VLAN on a bridge on a bond. The
// kernel's limit is 8 (MAX_NEST_DEV).
const maxStack = 8

// LeadThrough reports whether a default route uses one of the interfaces, directly or through a
// bond, bridge or VLAN above the interface.
func (r Routes) LeadThrough(host *discovery.Host, interfaces []sysfs.Device) bool {
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

func (r Routes) leadAbove(host *discovery.Host, name string, above int) bool {
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
