package inuse

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"syscall"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// nets are the network interfaces of a host and their use by routes.
type nets struct {
	all    []sysfs.Device
	routed map[string]string // a destination, by interface

	lists *reader // lists the interfaces; after an error, any function may have an unlisted interface
	reads *reader // reads the routes
}

// readNets reads the interfaces of the host, and the routes of its first process. It does not read
// /proc/net, which shows the network namespace of the reader.
func readNets(host *discovery.Host) *nets {
	n := &nets{routed: make(map[string]string), lists: &reader{FS: host.FS}, reads: &reader{FS: host.FS}}
	n.all, _ = sysfs.ClassDevices(n.lists, "net")
	four, err4 := sysfs.ReadText(n.reads, "proc/1/net/route", maxTable)
	six, err6 := sysfs.ReadText(n.reads, "proc/1/net/ipv6_route", maxTable)
	n.reads.noteError(err4)
	n.reads.noteError(err6)
	if errors.Is(err4, fs.ErrNotExist) && errors.Is(err6, fs.ErrNotExist) { // a kernel may lack one of them
		n.reads.fail(err4)
	}
	for line := range strings.Lines(four) {
		if fields := strings.Fields(line); len(fields) >= 8 && fields[0] != "Iface" {
			n.add(fields[0], fields[1], fields[7])
		}
	}
	for line := range strings.Lines(six) {
		fields := strings.Fields(line)
		// Every interface in state up has link-local and multicast routes.
		if len(fields) == 10 && !strings.HasPrefix(fields[0], "fe8") && !strings.HasPrefix(fields[0], "ff") {
			n.add(fields[9], fields[0], fields[1])
		}
	}
	return n
}

// add adds a route by its destination and the prefix length or mask, in hexadecimal digits.
func (n *nets) add(name, destination, prefix string) {
	what := "a route of the host leads through it"
	if strings.Trim(destination+prefix, "0") == "" {
		what = "the host's default route leads through it"
	}
	if n.routed[name] == "" || strings.Contains(what, "default") {
		n.routed[name] = what
	}
}

// usesOn returns the uses of the interfaces on the function. To unbind the function, the interfaces
// must also be down, because the MACVLAN interface of a container is not visible here.
func (n *nets) usesOn(function sysfs.Device) (uses Uses) {
	if n.lists.err != nil {
		return Uses{{Object: "an interface", ReadError: n.lists.err}}
	}
	found := 0
	for _, d := range n.all {
		if !isBelow(d, function) {
			continue
		}
		found++
		uses = append(uses, n.interfaceUses(d)...)
	}
	r := &reader{FS: n.reads.FS}
	hidden := n.hiddenBelow(r, function) || found == 0 && hasHidden(r, function.Path)
	if r.err != nil {
		return append(uses, Use{Object: "its interface", ReadError: r.err})
	}
	if hidden {
		uses = append(uses, Use{Object: "its interface", How: "it is in a network namespace of its own, as that of a container"})
	}
	return uses
}

// interfaceUses returns the uses of one interface.
func (n *nets) interfaceUses(d sysfs.Device) (uses Uses) {
	object := "interface " + d.Name()
	r := &reader{FS: n.reads.FS}
	if use := n.stackedUse(r, d.Name(), maxStack); use != "" {
		uses = append(uses, Use{Object: object, How: use})
	}
	if err := cmp.Or(n.reads.err, r.err); err != nil {
		uses = append(uses, Use{Object: object, ReadError: err})
	}
	attrs := d.Attrs()
	flags, ok := attrs.Uint("flags")
	if r.noteError(attrs.Err()); attrs.Err() != nil {
		uses = append(uses, Use{Object: object, ReadError: r.err, BlocksUnbind: true})
	}
	if ok && flags&1 != 0 { // IFF_UP
		uses = append(uses, Use{Object: object, How: "it is up; set it down first", BlocksUnbind: true})
	}
	return uses
}

// hiddenBelow reports whether another network namespace than the reader's has an interface of the
// function, of one of its ports or of its sub-functions. A directory "net" lists only the reader's
// interfaces, but its link count includes all interfaces (fs/kernfs/inode.c, kernfs_refresh_inode).
func (n *nets) hiddenBelow(r *reader, function sysfs.Device) bool {
	seen := make(map[string]int) // interfaces, by directory
	for _, d := range n.all {
		seen[path.Dir(d.Path)]++
	}
	hidden := false
	_ = fs.WalkDir(r, function.Path, func(name string, entry fs.DirEntry, _ error) error {
		if entry == nil || !entry.IsDir() || entry.Name() != "net" {
			return nil
		}
		if info, err := r.Stat(name); err == nil {
			stat, ok := info.Sys().(*syscall.Stat_t)
			hidden = hidden || ok && int(stat.Nlink)-2 > seen[name] // "." and the directory's own name
		}
		return fs.SkipDir
	})
	return hidden // r keeps the errors
}

// hasHidden reports whether a function without a visible interface must have one: the kernel itself
// drives the function, and the function is a network function.
func hasHidden(r *reader, name string) bool {
	function := sysfs.At(r, name) // At does not record errors of reading the driver
	attrs := function.Attrs()
	class, _ := attrs.Hex("class", 6)
	r.noteError(attrs.Err())
	driver := function.Driver()
	return strings.HasPrefix(class, "02") && driver != "" &&
		!strings.Contains(driver, "vfio") && !strings.Contains(driver, "stub") &&
		!function.HasEntry("uio") && !function.HasEntry("vfio-dev") && !onlyRDMA(r, function) && !hasVDPA(function)
}

// onlyRDMA reports whether a function is for RDMA only and has no interface. An Ethernet port has
// one, and an InfiniBand port has one if IPoIB is loaded (ipoib_add_one in
// drivers/infiniband/ulp/ipoib/ipoib_main.c). The port of an EFA is neither.
func onlyRDMA(r *reader, function sysfs.Device) bool {
	_, err := r.Stat("sys/module/ib_ipoib")
	layers := r.glob(function.Path + "/infiniband/*/ports/*/link_layer")
	for _, layer := range layers {
		switch r.text(layer) {
		case "Unknown", "Unspecified":
		case "InfiniBand":
			if err == nil {
				return false
			}
		default:
			return false
		}
	}
	return len(layers) > 0
}

// hasVDPA reports whether the function is used through vDPA. The vDPA devices are direct children
// of the function.
func hasVDPA(function sysfs.Device) bool {
	return slices.ContainsFunc(function.Children("."), func(d sysfs.Device) bool { return strings.HasPrefix(d.Name(), "vdpa") })
}

// maxStack is the maximum depth of stacked interfaces, such as a VLAN on a bridge on a bond. The
// kernel's limit is 8 (MAX_NEST_DEV).
const maxStack = 8

// stackedUse returns the use of an interface, or of an interface stacked on top.
func (n *nets) stackedUse(r *reader, name string, above int) string {
	if use := n.routed[name]; use != "" || above == 0 {
		return use
	}
	for _, entry := range r.listDir(path.Join("sys/class/net", name)) {
		upper, ok := strings.CutPrefix(entry.Name(), "upper_")
		if !ok {
			continue
		}
		if use := n.stackedUse(r, upper, above-1); use != "" {
			return fmt.Sprintf("%s is on it: %s", upper, use)
		}
		return fmt.Sprintf("%s is on it", upper)
	}
	return ""
}
