package sysfs

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// pciAddress is domain:bus:device.function. Domains of the VMD and Hyper-V
// bridges have more than four digits (drivers/pci/probe.c, "%04x").
var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)

// IsPCIAddress reports whether s is a PCI address as the kernel writes it,
// such as "0000:03:00.0".
func IsPCIAddress(s string) bool { return pciAddress.MatchString(s) }

// PCIID is what a PCI function says it is, in lower-case hexadecimal digits. A
// field is "" if it is not known.
type PCIID struct {
	Vendor, Device string // four digits
	Class          string // six digits: base class, sub-class, programming interface
}

// PCIID returns what the PCI function is. The modalias says it all in one file.
// Without a modalias, the files vendor, device and class say it
// (Documentation/ABI/testing/sysfs-bus-pci).
//
// It is no error if all of these files are missing. It is an error if one of them
// is missing beside others, cannot be read, or holds a number with fewer digits
// than the kernel writes. PCIID returns the first error, with the numbers that it
// could read.
func (d Device) PCIID() (PCIID, error) {
	if d.seen == nil {
		return d.readPCIID()
	}
	if !d.seen.knowsID {
		d.seen.id, d.seen.idErr = d.readPCIID()
		d.seen.knowsID = true
	}
	return d.seen.id, d.seen.idErr
}

// CheckedPCIID returns what PCIID does, and compares it with the files vendor,
// device and class. If one of those is there and says something else, or cannot be
// read, its number is left out and there is an error. Since this reads each file,
// it is for functions that are described, and not for all functions of a host.
func (d Device) CheckedPCIID() (PCIID, error) {
	id, err := d.PCIID()
	for _, file := range idFiles(&id) {
		value, there, fileErr := d.readID(file)
		if fileErr == nil && there && *file.value != "" && value != *file.value {
			fileErr = fmt.Errorf("attribute %s: %s, but %s in modalias", file.name, value, *file.value)
		}
		if fileErr != nil {
			*file.value = ""
			err = cmp.Or(err, fileErr)
		}
	}
	return id, err
}

func (d Device) readPCIID() (PCIID, error) {
	text, err := d.Text("modalias")
	if id, ok := parseModalias(text); ok {
		return id, nil
	}
	half := err == nil && strings.HasPrefix(text, "pci:")
	var id PCIID
	var first error
	var missing []string
	files := idFiles(&id)
	for _, file := range files {
		value, there, err := d.readID(file)
		if !there {
			missing = append(missing, file.name)
		}
		*file.value, first = value, cmp.Or(first, err)
	}
	if first == nil && len(missing) > 0 && (half || len(missing) < len(files)) {
		first = fmt.Errorf("attribute %s: not there", missing[0])
	}
	return id, first
}

// idFile is an attribute that holds a number of a PCIID, and its hexadecimal
// digits ("0x%04x" and "0x%06x" in drivers/pci/pci-sysfs.c).
type idFile struct {
	name   string
	value  *string
	digits int
}

func idFiles(id *PCIID) [3]idFile {
	return [...]idFile{{"vendor", &id.Vendor, 4}, {"device", &id.Device, 4}, {"class", &id.Class, 6}}
}

// readID reads a number of as many digits as the kernel writes, such as
// "0x10de", and reports whether the file is there.
func (d Device) readID(file idFile) (value string, there bool, err error) {
	text, err := d.Text(file.name)
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err == nil {
		number, ok := strings.CutPrefix(text, "0x")
		if value, err = parseHex(number, file.digits); !ok || err != nil {
			value, err = "", fmt.Errorf("not 0x and %d hexadecimal digits: %.32q", file.digits, text)
		}
	}
	if err != nil {
		err = fmt.Errorf("attribute %s: %w", file.name, err)
	}
	return value, true, err
}

// modaliasFields are what stands before the numbers of a PCI function's
// modalias, and how many digits follow (modalias_show in
// drivers/pci/pci-sysfs.c).
var modaliasFields = [...]struct {
	prefix string
	digits int
}{{"pci:v", 8}, {"d", 8}, {"sv", 8}, {"sd", 8}, {"bc", 2}, {"sc", 2}, {"i", 2}}

// parseModalias parses
// "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00". Anything else, such
// as the beginning of a modalias, is refused.
func parseModalias(text string) (PCIID, bool) {
	var numbers [len(modaliasFields)]string
	rest := text
	for i, field := range modaliasFields {
		var ok bool
		if rest, ok = strings.CutPrefix(rest, field.prefix); !ok || len(rest) < field.digits {
			return PCIID{}, false
		}
		numbers[i], rest = rest[:field.digits], rest[field.digits:]
		if strings.Trim(numbers[i], "0123456789ABCDEF") != "" {
			return PCIID{}, false
		}
	}
	vendor, ok := strings.CutPrefix(numbers[0], "0000")
	device, fits := strings.CutPrefix(numbers[1], "0000")
	class := numbers[4] + numbers[5] + numbers[6]
	return PCIID{strings.ToLower(vendor), strings.ToLower(device), strings.ToLower(class)}, ok && fits && rest == ""
}

// Asleep reports whether a PCI function is known to be suspended, or is on its way to or
// from suspension. The kernel answers power/runtime_status from memory, without the
// device's lock (rtpm_status_show in drivers/base/power/sysfs.c).
func (d Device) Asleep() bool {
	status, _ := d.Text("power/runtime_status")
	switch status {
	case "suspended", "suspending", "resuming":
		return true
	}
	return false
}

// WakesOnRead reports whether reading the link of a PCI function may resume the function.
// Since Linux 6.18, and in the stable kernels that have the change, max_link_width,
// current_link_speed and current_link_width read the configuration space between
// pci_config_pm_runtime_get and pci_config_pm_runtime_put (drivers/pci/pci-sysfs.c);
// max_link_speed is read from memory since Linux 6.13, and does the same in stable kernels
// before 6.12. These resume a function in D3cold, and no other: the registers can be read
// in the other states (drivers/pci/pci.c). The kernel answers power_state from memory
// (power_state_show in drivers/pci/pci-sysfs.c, since Linux 5.11). While a function is
// being suspended, power_state may still become D3cold.
func (d Device) WakesOnRead() bool {
	status, _ := d.Text("power/runtime_status")
	switch status {
	case "suspended":
		state, _ := d.Text("power_state")
		return !slices.Contains([]string{"D0", "D1", "D2", "D3hot"}, state)
	case "suspending", "resuming":
		return true
	}
	return false
}

// maxNUMANodes is how many NUMA nodes a kernel can be built for (NODES_SHIFT).
const maxNUMANodes = 1 << 10

// NUMANode returns the NUMA node that a PCI function is on. The function is on no
// node if the kernel says -1 or has no such attribute. It is an error if the
// kernel does not have the node (Documentation/ABI/stable/sysfs-devices-node).
func (d Device) NUMANode() (node int64, ok bool, err error) {
	attrs := d.Attrs()
	text, ok := attrs.Written("numa_node")
	if !ok || text == "-1" {
		return 0, false, attrs.Err()
	}
	node, err = strconv.ParseInt(text, 10, 32)
	const nodes = "sys/devices/system/node"
	_, listErr := fs.Stat(d.fsys, nodes)
	switch {
	case err != nil || node < 0 || strconv.FormatInt(node, 10) != text:
		err = fmt.Errorf("attribute numa_node: not the number of a NUMA node: %.32q", text)
	case node >= maxNUMANodes || listErr == nil && !At(d.fsys, nodes).Exists("node"+text):
		err = fmt.Errorf("attribute numa_node: the kernel has no NUMA node %d", node)
	}
	return node, err == nil, err
}

// IOMMUGroup returns the number of the IOMMU group that a PCI function is in,
// and whether it is in one (Documentation/ABI/testing/sysfs-kernel-iommu_groups).
func (d Device) IOMMUGroup() (group int64, ok bool, err error) {
	link := path.Join(d.Path, "iommu_group")
	target, err := fs.ReadLink(d.fsys, link)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		// A record has what was looked at, also where it is no link.
		if info, lerr := fs.Lstat(d.fsys, link); lerr == nil && info.Mode().IsRegular() {
			return 0, false, nil
		}
		return 0, false, fmt.Errorf("link iommu_group: %w", err)
	}
	number, err := strconv.ParseUint(path.Base(target), 10, 31)
	if err != nil {
		return 0, false, fmt.Errorf("link iommu_group: leads to no group: %.64q", target)
	}
	return int64(number), true, nil
}

// PCIFunction returns the PCI function that the device is, or sits on. It is the
// deepest directory on the device's path whose name is a PCI address.
func (d Device) PCIFunction() (Device, bool) {
	for dir := d; strings.Contains(dir.Path, "/"); dir = dir.Parent() {
		if IsPCIAddress(dir.Name()) {
			return dir, true
		}
	}
	return Device{}, false
}

// PCIRoot returns the root complex above a device, such as "pci0000:00", or
// "" if its path does not name one.
func (d Device) PCIRoot() string {
	for element := range strings.SplitSeq(d.Path, "/") {
		if domainBus, ok := strings.CutPrefix(element, "pci"); ok && strings.Contains(domainBus, ":") {
			return element
		}
	}
	return ""
}
