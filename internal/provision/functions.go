// Package provision makes the PCI functions of a host as the administrator wants
// them. It creates virtual functions, binds drivers, and sets what a family knows
// how to set. It changes no function that is in use, and none that is already as it
// should be. It knows no vendor, and nothing calls it but the command.
package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Rule says how the PCI functions that it selects are to be: either Driver, or
// the others, is set.
type Rule struct {
	Selects  func(discovery.Device) (bool, error)
	Driver   string
	Settings any  // of a type that a family has, nil if there are none
	VFs      *VFs // nil if they are not to be touched
}

// VFs are the virtual functions that a physical one is to have.
type VFs struct {
	Count  int
	Driver string // "" leaves it to the kernel
}

// function is a PCI function that a rule selects.
type function struct {
	sysfs.Device

	rule Rule
	err  error // what could not be read of it
}

// functions returns the functions that rules select, in the order of their
// addresses, and notes about the rules. The first rule that selects a function
// has it. If the rule of a physical function says how its virtual functions are to
// be, no other rule has these.
func functions(host *discovery.Host, rules []Rule, known []discovery.Device) (selected []function, notes []string, err error) {
	all, err := sysfs.Bus(host.FS, "pci")
	if err != nil {
		return nil, nil, err
	}
	used := make([]int, len(rules))
	unsaid := make([]error, len(rules))
	ruled := make(map[string]bool) // paths of physical functions
	for _, d := range all {
		described, err := describe(host, d, known)
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
				note += fmt.Sprintf("; of some it cannot be said: %v", unsaid[i])
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

// describe returns the device that rules are asked about. It has the attributes of
// any PCI function, and those of a family's device that is the function.
func describe(host *discovery.Host, d sysfs.Device, known []discovery.Device) (discovery.Device, error) {
	described, err := discovery.PCI(host, d)
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

// driverLoaded checks that the kernel has a driver for PCI functions.
func driverLoaded(host *discovery.Host, name string) error {
	_, err := fs.Stat(host.FS, "sys/bus/pci/drivers/"+name)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("driver %s is not loaded (modprobe %s)", name, name)
	}
	return err
}
