package inventory

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// Ask is how a pod can request a device.
type Ask struct {
	Class    string   `json:"deviceClass,omitempty"` // the most specific class that selects the device
	Any      string   `json:"celAny,omitempty"`      // CEL that selects equivalent devices
	This     string   `json:"celThis,omitempty"`     // CEL that selects only this device on this machine, or ""
	Limits   []string `json:"limits,omitempty"`      // extended resources
	Template string   `json:"template,omitempty"`    // a ResourceClaimTemplate for one equivalent device
}

// installedClasses returns the classes that claims can use.
func (f *Facts) installedClasses() []Class {
	if f.Installed == nil {
		return f.Classes
	}
	return slices.DeleteFunc(slices.Clone(f.Classes), func(c Class) bool { return !f.Installed(c.Name) })
}

// askFor sets the Ask of each device.
func askFor(devices []*Device, classes []Class) {
	unique := newUniqueness(devices)
	type like struct {
		key   string
		class string
	}
	known := make(map[string]like) // devices that differ only in their identity have the same class
	for _, d := range devices {
		for _, offer := range d.Offered.Offers {
			d.Ask.Limits = append(d.Ask.Limits, offer.Resource)
		}
		d.Ask.Any = celAny(d)
		key := strings.Join([]string{d.Family, d.Ask.Any, d.Offered.Attributes.String("function"), d.Offered.Attributes.String("resource"), strings.Join(d.Ask.Limits, ",")}, "\n")
		if _, done := known[key]; !done {
			known[key] = like{key, className(d, classes)}
		}
		d.Ask.Class = known[key].class
		d.Ask.This = unique.uniqueCEL(d)
		if d.Ask.Class != "" {
			d.Ask.Template = claimTemplate(d)
		}
	}
}

// className returns the most specific class that selects a device. Classes with one of the device's
// extended resources have precedence.
func className(d *Device, classes []Class) string {
	var best *Class
	offered := func(c *Class) bool {
		for _, offer := range d.Offered.Offers {
			if c.Resource == offer.Resource {
				return true
			}
		}
		return false
	}
	for i := range classes {
		c := &classes[i]
		if !c.selectsDevice(d.Offered) {
			continue
		}
		if best == nil || offered(c) && !offered(best) || offered(c) == offered(best) && c.Length > best.Length {
			best = c
		}
	}
	if best == nil {
		return ""
	}
	return best.Name
}

func (c *Class) selectsDevice(d *rules.Offered) bool {
	for _, selector := range c.Selectors {
		if selected, err := selector.SelectsDevice(d.Device); err != nil || !selected {
			return false
		}
	}
	return true
}

// attributeCEL returns CEL for an attribute with the present value. Unlike a plain comparison, it
// does not fail for devices without the attribute.
func attributeCEL(name resourceapi.QualifiedName, value discovery.Attribute) string {
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = discovery.Domain, string(name)
	}
	attribute := fmt.Sprintf("device.attributes[%q].?%s", domain, id)
	switch {
	case value.StringValue != nil:
		return fmt.Sprintf("%s.orValue(\"\") == %q", attribute, *value.StringValue)
	case value.IntValue != nil:
		return fmt.Sprintf("%s.orValue(-1) == %d", attribute, *value.IntValue)
	}
	return ""
}

// celAny returns CEL for devices of the same model and profile, or with the same PCI IDs.
func celAny(d *Device) string {
	attributes := d.Offered.Attributes
	names := []resourceapi.QualifiedName{"model", "profile"}
	if attributes.String("model") == "" {
		names = []resourceapi.QualifiedName{"pciVendor", "pciDevice", "profile"}
	}
	if attributes.String("model") == "" && attributes.String("pciDevice") == "" {
		names = []resourceapi.QualifiedName{"family", "kind", "profile"}
	}
	var all []string
	for _, name := range names {
		if value, there := attributes[name]; there {
			all = append(all, attributeCEL(name, value))
		}
	}
	return strings.Join(all, " && ")
}

// tellingAttributes are sets of attributes that may identify a device on a machine, the most
// familiar first. All attributes of a set are needed.
var tellingAttributes = [][]resourceapi.QualifiedName{
	{attrBusID}, {"uuid"}, {"serial"}, {"ifName"}, {"rdmaDevice"}, {"queueName"},
	{attrBusID, "partitionIndex"}, {"parent", "partitionIndex"}, {"parent", "vfIndex"}, {"pfPCIBusID", "sfNumber"},
	{attrBusID, "function"}, {attrBusID, "profile"}, {"parent", "profile"}, {attrBusID, "family"},
	{"family", "model"}, {"kind", "model"}, {"family", "resource"}, {"family", "kind"},
}

// uniqueness counts the devices with the same values of telling attributes.
type uniqueness []map[string]int

func newUniqueness(devices []*Device) uniqueness {
	u := make(uniqueness, len(tellingAttributes))
	for i, names := range tellingAttributes {
		u[i] = make(map[string]int)
		for _, d := range devices {
			if cel := celOf(d, names); cel != "" {
				u[i][cel]++
			}
		}
	}
	return u
}

// uniqueCEL returns CEL that selects only the device, or "".
func (u uniqueness) uniqueCEL(d *Device) string {
	for i, names := range tellingAttributes {
		if cel := celOf(d, names); u[i][cel] == 1 {
			return cel
		}
	}
	return ""
}

// celOf returns CEL for the values of attributes, or "" if the device lacks one.
func celOf(d *Device, names []resourceapi.QualifiedName) string {
	all := make([]string, len(names))
	for i, name := range names {
		value, there := d.Offered.Attributes[name]
		if all[i] = attributeCEL(name, value); !there || all[i] == "" {
			return ""
		}
	}
	return strings.Join(all, " && ")
}

// claimTemplate returns a ResourceClaimTemplate for one equivalent device.
func claimTemplate(d *Device) string {
	name := strings.Trim(notLabel.ReplaceAllString(strings.ToLower(d.Kind+"-"+d.Label), "-"), "-")
	name = strings.Trim(name[:min(len(name), 50)], "-")
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: %s
spec:
  spec:
    devices:
      requests:
      - name: %s
        exactly:
          deviceClassName: %s
`, name, cmp.Or(strings.Trim(notLabel.ReplaceAllString(d.Kind, "-"), "-"), "device"), d.Ask.Class)
	if d.Ask.Any != "" {
		fmt.Fprintf(&b, "          selectors:\n          - cel:\n              expression: >-\n                %s\n", d.Ask.Any)
	}
	return b.String()
}
