package fleet

import (
	"cmp"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
)

// describeDevice returns a device with its description for users.
func describeDevice(id ID, node string, d resourceapi.Device) Device {
	out := Device{ID: id, Node: node, Spec: d, Taints: taintsOf(&d), Kind: cmp.Or(Text(&d, "kind"), "other"), Model: modelName(&d)}
	if capacity, has := d.Capacity["memory"]; has {
		out.Memory = capacity.Value
	}
	switch {
	case len(d.ConsumesCounters) > 0:
		out.Silicon = d.ConsumesCounters[0].CounterSet
	case Text(&d, "function") == "partition":
		out.Silicon = Text(&d, "parent")
	}
	out.Label = label(&d, out.Kind)
	return out
}

// Text returns an attribute as text, or "". A name without a domain is in the domain of Chandler.
// For a list it returns the first value.
func Text(d *resourceapi.Device, name resourceapi.QualifiedName) string {
	a, found := d.Attributes[name]
	if !found {
		a = d.Attributes[discovery.Domain+"/"+name]
	}
	if values := discovery.Values(a); len(values) > 0 {
		return values[0]
	}
	return ""
}

// modelName returns the product's name or its PCI IDs, the profile, and "VFs" for virtual
// functions.
func modelName(d *resourceapi.Device) string {
	name := Text(d, "model")
	if first, rest, more := strings.Cut(name, " "); more && strings.EqualFold(first, Text(d, "vendor")) {
		name = rest // shorter, without loss of information
	}
	if vendor := Text(d, "pciVendor"); name == "" && vendor != "" {
		name = vendor + ":" + Text(d, "pciDevice")
	}
	words := []string{name, Text(d, "profile")}
	if Text(d, "function") == "virtual" {
		words = append(words, "VFs")
	}
	if name == "" && words[1] == "" {
		words[0] = cmp.Or(Text(d, "resource"), d.Name)
	}
	return strings.Join(strings.Fields(strings.Join(words, " ")), " ")
}

// label returns a short name of a device on its node: its kind and address, such as "gpu 1a:00.0",
// with the number of a partition. For other than PCI devices it returns the device's name.
func label(d *resourceapi.Device, kind string) string {
	address := ShortAddress(Text(d, deviceattribute.StandardDeviceAttributePCIBusID))
	if address == "" {
		return d.Name
	}
	if parent := Text(d, "parent"); parent != "" {
		if part, is := strings.CutPrefix(d.Name, parent+"-"); is {
			return kind + " " + address + " " + strings.ReplaceAll(part, "-", " ")
		}
	}
	if _, share, found := strings.Cut(d.Name, "-share-"); found {
		return kind + " " + address + " share " + share
	}
	return kind + " " + address
}

// ShortAddress returns a PCI address without its domain if the domain is 0.
func ShortAddress(address string) string { return strings.TrimPrefix(address, "0000:") }

// Is reports whether a word identifies the device: its name, label, UUID, serial number, interface,
// or PCI address with or without the domain.
func (d *Device) Is(word string) bool {
	if word == "" {
		return false
	}
	address := Text(&d.Spec, deviceattribute.StandardDeviceAttributePCIBusID)
	for _, is := range []string{d.Device, d.Label, Text(&d.Spec, "uuid"), Text(&d.Spec, "serial"), Text(&d.Spec, "ifName"), Text(&d.Spec, "rdmaDevice"), address, ShortAddress(address)} {
		if strings.EqualFold(is, word) {
			return true
		}
	}
	return false
}
