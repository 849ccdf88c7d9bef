package rules

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

// FamiliesWithoutClass returns the families, sorted, of devices that none of the DeviceClasses
// selects. A class whose expression is invalid, or fails for a device, does not select the device.
func FamiliesWithoutClass(classes []resourceapi.DeviceClass, devices []Offered) (families []string) {
	var compiled [][]Selector // of each class; all of its selectors must select a device
	for i := range classes {
		selectors, valid := compileClass(&classes[i])
		if valid {
			compiled = append(compiled, selectors)
		}
	}
	for i := range devices {
		d := &devices[i]
		selectedBy := func(class []Selector) bool {
			return !slices.ContainsFunc(class, func(s Selector) bool {
				selected, err := s.SelectsDevice(d.Device)
				return err != nil || !selected
			})
		}
		if !slices.Contains(families, d.Family) && !slices.ContainsFunc(compiled, selectedBy) {
			families = append(families, d.Family)
		}
	}
	slices.Sort(families)
	return families
}

// compileClass compiles the expressions of a DeviceClass, and reports false if one is invalid.
func compileClass(class *resourceapi.DeviceClass) (selectors []Selector, valid bool) {
	for _, s := range class.Spec.Selectors {
		if s.CEL == nil {
			return nil, false
		}
		selector, err := Compile(s.CEL.Expression)
		if err != nil {
			return nil, false
		}
		selectors = append(selectors, selector)
	}
	return selectors, true
}
