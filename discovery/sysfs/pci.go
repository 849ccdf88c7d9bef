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

// pciAddress matches domain:bus:device.function. Domains of the VMD and Hyper-V bridges have more
// than four digits (drivers/pci/probe.c, "%04x").
var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)

// IsPCIAddress reports whether s is a PCI address in the kernel's form, such as "0000:03:00.0".
func IsPCIAddress(s string) bool { return pciAddress.MatchString(s) }

// PCIID contains the IDs of a PCI function, in lower-case hexadecimal digits. An unknown field is
// "".
type PCIID struct {
	Vendor, Device string // four digits
	Class          string // six digits: base class, sub-class, programming interface
}

// PCIID returns the IDs of the PCI function. The file modalias contains all IDs. Without a
// modalias, PCIID reads the files vendor, device and class
// (Documentation/ABI/testing/sysfs-bus-pci).
//
// If all of these files are missing, there is no error. If one of them is missing while others
// exist, is unreadable, or contains fewer digits than the kernel writes, PCIID returns the first
// error, together with the IDs that it could read.
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

// CheckedPCIID returns the result of PCIID after comparing it with the files vendor, device and
// class. If one of these files differs or is unreadable, its ID is left out and there is an error.
// CheckedPCIID reads each file, so use it for functions that are described, and not for all
// functions of a host.
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
		first = fmt.Errorf("attribute %s is missing", missing[0])
	}
	return id, first
}

// idFile is an attribute with one ID of a PCIID, and the number of its hexadecimal digits ("0x%04x"
// and "0x%06x" in drivers/pci/pci-sysfs.c).
type idFile struct {
	name   string
	value  *string
	digits int
}

func idFiles(id *PCIID) [3]idFile {
	return [...]idFile{{"vendor", &id.Vendor, 4}, {"device", &id.Device, 4}, {"class", &id.Class, 6}}
}

// readID reads an ID with the number of digits that the kernel writes, such as "0x10de". there is
// false if the file is missing.
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

// modaliasFields lists the prefixes of the numbers in a PCI function's modalias, and the numbers of
// digits (modalias_show in drivers/pci/pci-sysfs.c).
var modaliasFields = [...]struct {
	prefix string
	digits int
}{{"pci:v", 8}, {"d", 8}, {"sv", 8}, {"sd", 8}, {"bc", 2}, {"sc", 2}, {"i", 2}}

// parseModalias parses "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00". The second result
// is false for any other text, such as the beginning of a modalias.
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

// IsSuspended reports whether a PCI function is known to be suspended, suspending or resuming. The
// kernel answers power/runtime_status from memory, without the device's lock (rtpm_status_show in
// drivers/base/power/sysfs.c).
func (d Device) IsSuspended() bool {
	status, _ := d.Text("power/runtime_status")
	switch status {
	case "suspended", "suspending", "resuming":
		return true
	}
	return false
}

// WakesOnRead reports whether reading the link attributes of a PCI function may resume the
// function. Since Linux 6.18, and in stable kernels with the change, max_link_width,
// current_link_speed and current_link_width read the configuration space between
// pci_config_pm_runtime_get and pci_config_pm_runtime_put (drivers/pci/pci-sysfs.c); max_link_speed
// is read from memory since Linux 6.13, and behaves the same in stable kernels before 6.12. These
// calls resume a function only in D3cold: the registers are readable in the other states
// (drivers/pci/pci.c). The kernel answers power_state from memory (power_state_show in
// drivers/pci/pci-sysfs.c, since Linux 5.11). While a function is suspending, power_state may still
// become D3cold.
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

// maxNUMANodes is the maximum number of NUMA nodes of a kernel (NODES_SHIFT).
const maxNUMANodes = 1 << 10

// NUMANode returns the NUMA node of a PCI function. ok is false if the attribute is -1 or missing.
// If the kernel does not list the node, NUMANode returns an error
// (Documentation/ABI/stable/sysfs-devices-node).
func (d Device) NUMANode() (node int64, ok bool, err error) {
	attrs := d.Attrs()
	text, ok := attrs.RequiredText("numa_node")
	if !ok || text == "-1" {
		return 0, false, attrs.Err()
	}
	node, err = strconv.ParseInt(text, 10, 32)
	const nodes = "sys/devices/system/node"
	_, listErr := fs.Stat(d.fsys, nodes)
	switch {
	case err != nil || node < 0 || strconv.FormatInt(node, 10) != text:
		err = fmt.Errorf("attribute numa_node: not the number of a NUMA node: %.32q", text)
	case node >= maxNUMANodes || listErr == nil && !At(d.fsys, nodes).HasEntry("node"+text):
		err = fmt.Errorf("attribute numa_node: the kernel has no NUMA node %d", node)
	}
	return node, err == nil, err
}

// IOMMUGroup returns the number of the IOMMU group of a PCI function. ok is false if the function
// has no group (Documentation/ABI/testing/sysfs-kernel-iommu_groups).
func (d Device) IOMMUGroup() (group int64, ok bool, err error) {
	link := path.Join(d.Path, "iommu_group")
	target, err := fs.ReadLink(d.fsys, link)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		// A recording also contains inspected entries that are not links.
		if info, lerr := fs.Lstat(d.fsys, link); lerr == nil && info.Mode().IsRegular() {
			return 0, false, nil
		}
		return 0, false, fmt.Errorf("link iommu_group: %w", err)
	}
	number, err := strconv.ParseUint(path.Base(target), 10, 31)
	if err != nil {
		return 0, false, fmt.Errorf("link iommu_group: does not lead to an IOMMU group: %.64q", target)
	}
	return int64(number), true, nil
}

// PCIFunction returns the PCI function that contains the device, or the device itself. The function
// is the deepest directory on the device's path whose name is a PCI address.
func (d Device) PCIFunction() (Device, bool) {
	for dir := d; strings.Contains(dir.Path, "/"); dir = dir.Parent() {
		if IsPCIAddress(dir.Name()) {
			return dir, true
		}
	}
	return Device{}, false
}

// PCIRoot returns the root complex above a device, such as "pci0000:00", or "" if the path contains
// none.
func (d Device) PCIRoot() string {
	for element := range strings.SplitSeq(d.Path, "/") {
		if domainBus, ok := strings.CutPrefix(element, "pci"); ok && strings.Contains(domainBus, ":") {
			return element
		}
	}
	return ""
}
