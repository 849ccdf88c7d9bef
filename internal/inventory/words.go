package inventory

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pciids"
	"chandler.dev/internal/natural"
)

// ShortModel returns the model of the device without the vendor.
func (d *Device) ShortModel() string {
	attributes := d.Offered.Attributes
	first, rest, found := strings.Cut(d.Model, " ")
	if found && rest != "" && strings.EqualFold(first, attributes.String("vendor")) && attributes.String("model") != "" {
		return rest
	}
	return d.Model
}

// Model returns the model, or otherwise the best known description of the device.
func Model(d *discovery.Device, products pciids.Names) string {
	if name := cmp.Or(d.Attributes.String("model"), products.Product(d)); name != "" {
		return name
	}
	vendor, device := d.Attributes.String("pciVendor"), d.Attributes.String("pciDevice")
	if vendor != "" && device != "" {
		if architecture := d.Attributes.String("architecture"); architecture != "" {
			return architecture
		}
		return strings.TrimSpace(d.Attributes.String("vendor") + " " + vendor + ":" + device)
	}
	if vendor := d.Attributes.String("vendor"); vendor != "" {
		return vendor + " " + cmp.Or(d.Attributes.String("kind"), "device")
	}
	return d.Name
}

// Detail returns what distinguishes the device from others of its model: the kernel's name of an
// interface, or the profile of a partition. It is "" if there is nothing of the kind.
func Detail(d *discovery.Device) string {
	for _, name := range []resourceapi.QualifiedName{"ifName", "rdmaDevice", "queueName", "profile"} {
		if value := d.Attributes.String(name); value != "" {
			return value
		}
	}
	return ""
}

// Bytes formats an amount of memory, with "" for none.
func Bytes(n int64) string {
	const mebi, gibi = 1 << 20, 1 << 30
	in := func(unit int64, name string) string {
		return strings.TrimSuffix(strconv.FormatFloat(float64(n)/float64(unit), 'f', 1, 64), ".0") + " " + name
	}
	switch {
	case n == 0:
		return ""
	case n >= gibi:
		return in(gibi, "GiB")
	}
	return in(mebi, "MiB")
}

var (
	functionName = regexp.MustCompile(`^pci(-[0-9a-f]+){4}`)
	notLabel     = regexp.MustCompile(`[^a-z0-9]+`)
)

// CompareDevices compares names of devices: neuron2 comes before neuron10, and PCI functions are in the
// order of their addresses, whose numbers are hexadecimal.
func CompareDevices(a, b string) int {
	addressA, addressB := functionName.FindString(a), functionName.FindString(b)
	return cmp.Or(strings.Compare(addressA, addressB), natural.CompareNames(a[len(addressA):], b[len(addressB):]))
}

// Ranges sorts numbers and formats them as ranges such as "24-27, 32", with the given dash.
func Ranges(numbers []int, dash string) string {
	slices.Sort(numbers)
	var parts []string
	for i := 0; i < len(numbers); {
		j := i
		for j+1 < len(numbers) && numbers[j+1] == numbers[j]+1 {
			j++
		}
		part := strconv.Itoa(numbers[i])
		if j > i {
			part += dash + strconv.Itoa(numbers[j])
		}
		parts, i = append(parts, part), j+1
	}
	return strings.Join(parts, ", ")
}

// CountText returns the number of physical devices of each kind, such as "8 gpu (10 devices, 5
// free)". The number of devices, with each partition and each virtual function, is left out if it is
// the same. A device and its partitions exclude each other: "1 npu (9 devices, 8 at once)".
func (inv *Inventory) CountText() string {
	var kinds []string
	for _, c := range inv.Counts {
		if c.Devices == 0 {
			continue
		}
		text, more := fmt.Sprintf("%d %s", c.Physical, c.Kind), []string(nil)
		if c.Listed != c.Physical {
			more = append(more, CountNoun(c.Listed, "device"))
		}
		if c.Listed != c.Devices {
			more = append(more, fmt.Sprintf("%d at once", c.Devices))
		}
		if inv.ConsumersKnown && c.All > 0 {
			more = append(more, fmt.Sprintf("%d free", c.FreeDevices))
		}
		if inv.ConsumersKnown && c.Open > 0 {
			more = append(more, fmt.Sprintf("%d with unlimited sharing", c.Open))
		}
		if len(more) > 0 {
			text += " (" + strings.Join(more, ", ") + ")"
		}
		kinds = append(kinds, text)
	}
	return strings.Join(kinds, ", ")
}

// DescribeEmpty returns a sentence for an inventory without devices. It differs if data of the host
// could not be read.
func (inv *Inventory) DescribeEmpty() string {
	switch {
	case len(inv.Problems) > 0:
		return "No accelerators found. Some data of the host could not be read."
	case inv.Functions > 0:
		return fmt.Sprintf("No accelerators found. None of the %d device families describes any of %s.", inv.Families, CountNoun(inv.Functions, "PCI function"))
	}
	return "No accelerators found."
}

// CountNoun returns "1 pod" or "2 pods".
func CountNoun(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

// APIName returns the usual name of an API: DRA, or plugin.
func APIName(api discovery.Mode) string {
	if api == discovery.ModeDevicePlugin {
		return "plugin"
	}
	return string(api)
}
