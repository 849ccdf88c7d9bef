// Package pciids reads names of PCI devices from the host's copy of the PCI ID Repository
// (https://pci-ids.ucw.cz), which lspci uses too. The kernel has no names of most devices.
package pciids

import (
	"bufio"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"chandler.dev/discovery"
)

// File is the place of the file in a host recording.
const File = "usr/share/misc/pci.ids"

// files are the places of the file: on Debian, and on Fedora and other distributions.
var files = []string{File, "usr/share/hwdata/pci.ids", "usr/share/pci.ids"}

// ID is the vendor and the device of a PCI function, in lower-case hexadecimal digits.
type ID struct {
	Vendor, Device string
}

// Names are the names of devices by ID.
type Names map[ID]string

// IDOf returns the ID of a device, and whether the device has one.
func IDOf(d *discovery.Device) (ID, bool) {
	id := ID{d.Attributes.String("pciVendor"), d.Attributes.String("pciDevice")}
	return id, id.Vendor != "" && id.Device != ""
}

// Read returns the names of devices. A name is missing if the host has no copy of the repository, or
// an older one.
func Read(host fs.FS, devices []discovery.Device) Names {
	wanted := make(map[ID]bool)
	for i := range devices {
		if id, ok := IDOf(&devices[i]); ok {
			wanted[id] = true
		}
	}
	names := make(Names)
	for _, name := range files {
		if len(wanted) == 0 {
			break
		}
		f, err := host.Open(name)
		if err != nil {
			continue
		}
		names.parse(bufio.NewScanner(f), wanted)
		_ = f.Close() // it was only read
		break
	}
	return names
}

// parse reads the wanted names. A line without a tab has a vendor, a line with one tab a device of
// that vendor, and a line with two tabs a subsystem. The classes of devices follow; their lines begin
// with "C ".
func (n Names) parse(lines *bufio.Scanner, wanted map[ID]bool) {
	vendor := ""
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "C ") {
			return
		}
		rest, isDevice := strings.CutPrefix(line, "\t")
		id, name, found := strings.Cut(rest, "  ")
		switch {
		case !found || strings.HasPrefix(rest, "\t") || strings.HasPrefix(rest, "#"):
		case !isDevice:
			vendor = id
		case wanted[ID{vendor, id}]:
			n[ID{vendor, id}] = strings.TrimSpace(name)
		}
	}
}

// Text returns the names in the form of the repository.
func (n Names) Text() []byte {
	var out strings.Builder
	vendor := ""
	for _, id := range slices.SortedFunc(maps.Keys(n), func(a, b ID) int {
		return strings.Compare(a.Vendor+a.Device, b.Vendor+b.Device)
	}) {
		if id.Vendor != vendor {
			vendor = id.Vendor
			fmt.Fprintf(&out, "%s  \n", vendor)
		}
		fmt.Fprintf(&out, "\t%s  %s\n", id.Device, n[id])
	}
	return []byte(out.String())
}

// Product returns the name by which a device is sold, "" if the name is unknown. The repository has
// the name of the chip, with that of the product in brackets: "GP100GL [Tesla P100 PCIe 16GB]".
func (n Names) Product(d *discovery.Device) string {
	id, ok := IDOf(d)
	if !ok {
		return ""
	}
	name := n[id]
	if _, product, found := strings.Cut(name, "["); found && strings.HasSuffix(product, "]") {
		return strings.TrimSuffix(product, "]")
	}
	return name
}
