package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// nets are the network interfaces of a host and which of them its routes use.
type nets struct {
	host   *discovery.Host
	all    []sysfs.Device
	routed map[string]string // a destination, by the interface that leads to it
	err    error
}

// readNets reads the interfaces of the host, and the routes of its first process.
// It does not read /proc/net, which shows the network namespace of its reader.
func readNets(host *discovery.Host) nets {
	n := nets{host: host, routed: make(map[string]string)}
	var err error
	if n.all, err = sysfs.Class(host.FS, "net"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.err = err
		return n
	}
	four, err4 := sysfs.ReadText(host.FS, "proc/1/net/route", maxTable)
	six, err6 := sysfs.ReadText(host.FS, "proc/1/net/ipv6_route", maxTable)
	switch missing4, missing6 := errors.Is(err4, fs.ErrNotExist), errors.Is(err6, fs.ErrNotExist); {
	case missing4 && !missing6: // a kernel may be without one of them
		err4 = nil
	case missing6 && !missing4:
		err6 = nil
	}
	n.err = errors.Join(err4, err6)
	for line := range strings.Lines(four) {
		if fields := strings.Fields(line); len(fields) >= 8 && fields[0] != "Iface" {
			n.add(fields[0], fields[1], fields[7])
		}
	}
	for line := range strings.Lines(six) {
		fields := strings.Fields(line)
		// Every interface that is up has link-local and multicast routes.
		if len(fields) == 10 && !strings.HasPrefix(fields[0], "fe8") && !strings.HasPrefix(fields[0], "ff") {
			n.add(fields[9], fields[0], fields[1])
		}
	}
	return n
}

// add adds a route by its destination and the length of the prefix, or the mask,
// in hexadecimal digits.
func (n *nets) add(name, destination, prefix string) {
	what := "a route of the host leads through it"
	if strings.Trim(destination+prefix, "0") == "" {
		what = "the host's default route leads through it"
	}
	if n.routed[name] == "" || strings.Contains(what, "default") {
		n.routed[name] = what
	}
}

// below tells whether an interface on the function is in use. An interface that is
// to be unbound must also be down, since a container's MACVLAN on it does not show
// here.
func (n *nets) below(function sysfs.Device, unbind bool) error {
	found := 0
	for _, d := range n.all {
		if !below(d, function) {
			continue
		}
		found++
		if n.err != nil {
			return fmt.Errorf("whether interface %s is in use cannot be told: %w", d.Name(), n.err)
		}
		if use := n.use(d.Name(), maxStack); use != "" {
			return fmt.Errorf("in use: interface %s: %s", d.Name(), use)
		}
		attrs := d.Attrs()
		flags, ok := attrs.Uint("flags")
		if err := attrs.Err(); err != nil && unbind {
			return fmt.Errorf("whether interface %s is in use cannot be told: %w", d.Name(), err)
		}
		if unbind && ok && flags&1 != 0 { // IFF_UP
			return fmt.Errorf("in use: interface %s is up; set it down first", d.Name())
		}
	}
	if found == 0 && hasHidden(function) {
		return errors.New("in use: its interface is in a network namespace of its own, as that of a container")
	}
	return nil
}

// hasHidden reports whether a function must have an interface, given that none
// is seen: it is a network function that the kernel itself drives.
func hasHidden(function sysfs.Device) bool {
	attrs := function.Attrs()
	class, _ := attrs.Hex("class", 6)
	driver := function.Driver()
	return strings.HasPrefix(class, "02") && driver != "" &&
		!strings.Contains(driver, "vfio") && !strings.Contains(driver, "stub") &&
		!slices.ContainsFunc([]string{"uio", "infiniband", "vfio-dev"}, function.Exists) && !hasVDPA(function)
}

// hasVDPA reports whether the function is used through vDPA, whose devices are
// right below it.
func hasVDPA(function sysfs.Device) bool {
	return slices.ContainsFunc(function.Children("."), func(d sysfs.Device) bool { return strings.HasPrefix(d.Name(), "vdpa") })
}

// maxStack bounds how many interfaces lie above one another: a VLAN on a bridge
// on a bond. The kernel's bound is 8 (MAX_NEST_DEV).
const maxStack = 8

// use returns what an interface, or one that lies above it, is used for.
func (n *nets) use(name string, above int) string {
	if use := n.routed[name]; use != "" {
		return use
	}
	dir := path.Join("sys/class/net", name)
	entries, err := fs.ReadDir(n.host.FS, dir)
	if err != nil || above == 0 {
		return ""
	}
	for _, entry := range entries {
		upper, ok := strings.CutPrefix(entry.Name(), "upper_")
		if !ok {
			continue
		}
		if use := n.use(upper, above-1); use != "" {
			return fmt.Sprintf("%s is on it: %s", upper, use)
		}
		return fmt.Sprintf("%s is on it", upper)
	}
	return ""
}
