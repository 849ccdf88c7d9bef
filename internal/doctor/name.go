package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pciids"
)

// title returns a name of a device for people: its kind, address and model. If the kernel does not know
// the model, it is the name from the host's list of PCI IDs.
func (f *Facts) title(d *discovery.Device) string {
	words := []string{d.Attributes.String("kind")}
	if words[0] == "" || words[0] == "other" {
		words[0] = d.Family
	}
	if address := d.Attributes.String("resource.kubernetes.io/pciBusID"); address != "" {
		words = append(words, strings.TrimPrefix(address, "0000:"))
		if rest := partSuffix(d); rest != "" {
			words = append(words, rest)
		}
	} else {
		words = append(words, d.Name)
	}
	model := d.Attributes.String("model")
	if model == d.Name {
		model = ""
	}
	if model = cmp.Or(model, f.Devices.Products.Product(d)); model != "" {
		words = append(words, model)
	} else if id, ok := pciids.IDOf(d); ok {
		words = append(words, id.Vendor+":"+id.Device)
	}
	return strings.Join(slices.Compact(words), " ")
}

// partSuffix returns the end of a partition's name, which distinguishes the partition from others
// of the same physical device.
func partSuffix(d *discovery.Device) string {
	if d.PartOf == nil {
		return ""
	}
	rest, found := strings.CutPrefix(d.Name, d.PartOf.Name)
	if !found && functionOf(d.Name) == pciAddress(d) {
		return "" // a virtual function, which has an address of its own
	}
	return strings.Trim(rest, "-")
}

// lastingText returns the duration of a state as text, or "" if the duration is unknown.
func lastingText(since, now time.Time) string {
	if since.IsZero() || now.Sub(since) < 2*time.Second {
		return ""
	}
	d := now.Sub(since)
	const day = 24 * time.Hour
	switch {
	case d < time.Minute:
		return fmt.Sprintf(", for %d s", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf(", for %d min", d/time.Minute)
	case d < day:
		return fmt.Sprintf(", for %d h", d/time.Hour)
	}
	return fmt.Sprintf(", for %d d", d/day)
}

// pciAddress returns the PCI address of a device in the kernel's form, or "".
func pciAddress(d *discovery.Device) string {
	return d.Attributes.String("resource.kubernetes.io/pciBusID")
}

// apiName returns the name of an API for people.
func apiName(mode discovery.Mode) string {
	switch mode {
	case discovery.ModeDRA:
		return "DRA"
	case discovery.ModeDevicePlugin:
		return "the device plugin"
	}
	return "no API"
}
