// Package provision configures the PCI functions of a host according to the administrator's
// rules. It creates virtual functions, binds drivers, and applies settings defined by
// families. It changes no function in use, and none already in the desired state. It is
// independent of vendors, and is used by the provision command only.
package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Rule describes the desired state of the PCI functions that it selects. Either Driver is set,
// or Settings and VFs.
type Rule struct {
	Selects  func(discovery.Device) (bool, error)
	Driver   string
	Settings any  // of a type defined by a family; nil for none
	VFs      *VFs // nil leaves virtual functions unchanged
}

// VFs describes the desired virtual functions of a physical function.
type VFs struct {
	Count  int
	Driver string // "" leaves the choice to the kernel
}

// function is a PCI function selected by a rule.
type function struct {
	sysfs.Device

	rule Rule
	err  error // error while reading the function's attributes
}

// selectFunctions returns the functions selected by rules, in the order of their addresses, and
// notes about the rules. The first rule that selects a function applies. If the rule of a
// physical function defines virtual functions, no other rule applies to these.
func selectFunctions(host *discovery.Host, rules []Rule, known []discovery.Device) (selected []function, notes []string, err error) {
	all, err := sysfs.BusDevices(host.FS, "pci")
	if err != nil {
		return nil, nil, err
	}
	used := make([]int, len(rules))
	unsaid := make([]error, len(rules))
	ruled := make(map[string]bool) // paths of physical functions whose rule defines virtual functions
	for _, d := range all {
		described, err := describeFunction(host, d, known)
		for i, rule := range rules {
			selects, selectErr := rule.Selects(described)
			if selectErr != nil && unsaid[i] == nil {
				unsaid[i] = selectErr
			}
			if selects {
				used[i]++
				ruled[d.Path] = rule.VFs != nil
				selected = append(selected, function{d, rule, err})
				break
			}
		}
	}
	for i := range rules {
		if used[i] == 0 {
			note := fmt.Sprintf("functions[%d] selects no PCI function", i)
			if unsaid[i] != nil {
				note += fmt.Sprintf("; of some it is unknown: %v", unsaid[i])
			}
			notes = append(notes, note)
		}
	}
	kept := selected[:0]
	for _, f := range selected {
		if physical, ok := f.LinkTo("physfn"); !ok || !ruled[physical.Path] {
			kept = append(kept, f)
		}
	}
	return kept, notes, nil
}

// describeFunction returns the device that rules are evaluated on. It has the attributes of any PCI
// function, and the attributes of the family's devices for the function.
func describeFunction(host *discovery.Host, d sysfs.Device, known []discovery.Device) (discovery.Device, error) {
	described, err := pci.DescribeFunction(host, d)
	attrs := d.Attrs()
	class, _ := attrs.Hex("class", 6)
	described.Attributes.SetString("pciClass", class)
	for _, device := range known {
		if device.Source != d.Path {
			continue
		}
		for name, value := range device.Attributes {
			if _, ours := described.Attributes[name]; !ours {
				described.Attributes[name] = value
			}
		}
		maps.Copy(described.Capacity, device.Capacity)
	}
	return described, errors.Join(err, attrs.Err())
}

// driverLoaded returns an error if the kernel has no such driver for PCI functions.
func driverLoaded(host *discovery.Host, name string) error {
	_, err := fs.Stat(host.FS, "sys/bus/pci/drivers/"+name)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("driver %s is not loaded (modprobe %s)", name, name)
	}
	return err
}
