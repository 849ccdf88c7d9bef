package v1alpha1

import (
	"cmp"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// validateNames reports resource names with several meanings, because a container that requests a
// name must get a defined device. Entries for different nodes, according to together, do not
// conflict.
func (c *DriverConfig) validateNames(together func(a, b *Nodes) bool) (errs field.ErrorList) {
	for i := range c.Sharing {
		at := field.NewPath("sharing").Index(i).Child("resource")
		share := &c.Sharing[i]
		for j := range c.Sharing[:i] {
			before := &c.Sharing[j]
			if share.Resource == "" || share.Resource != before.Resource || share.sharesEqually(before) || share.overriddenBy(before) {
				continue
			}
			if together(before.Nodes, share.Nodes) {
				errs = append(errs, InvalidField(at, "is %q, as that of sharing[%d] is, whose shares are others", share.Resource, j)...)
			}
		}
		errs = append(errs, c.checkPathName(share.Resource, share.Selector, together, at)...)
	}
	for i, resource := range c.Resources {
		at := field.NewPath("resources").Index(i).Child("name")
		for j, share := range c.Sharing {
			if resource.Name == share.Resource && resource.CEL != share.CEL && together(share.Nodes, resource.Nodes) {
				errs = append(errs, InvalidField(at, "is %q, under which sharing[%d] offers shares; want another name, or the same cel in both", resource.Name, j)...)
			}
		}
		errs = append(errs, c.checkPathName(resource.Name, resource.Selector, together, at)...)
	}
	return errs
}

// overriddenBy reports whether an entry before this one is for the same devices on some nodes, so
// that this entry does not apply there.
func (s *Sharing) overriddenBy(before *Sharing) bool {
	return s.CEL == before.CEL && before.Nodes != nil && !sameNodes(s.Nodes, before.Nodes)
}

// sharesEqually reports whether the shares of both entries are equal. The number of shares per
// device can differ.
func (s *Sharing) sharesEqually(other *Sharing) bool {
	switch {
	case (s.Unit == nil) != (other.Unit == nil) || s.Pool != other.Pool:
		return false
	case s.Unit != nil:
		return s.Unit.Cmp(*other.Unit) == 0 && cmp.Or(s.Capacity, defaultCapacity) == cmp.Or(other.Capacity, defaultCapacity)
	}
	return !s.Pool || s.Replicas == other.Replicas
}

// defaultCapacity is the default capacity of units.
const defaultCapacity = "memory"

// checkPathName reports a name that is also a name of paths, unless the expression selects these
// devices by the name.
func (c *DriverConfig) checkPathName(name string, selector Selector, together func(a, b *Nodes) bool, at *field.Path) field.ErrorList {
	for i := range c.Paths {
		if c.Paths[i].Name == name && !strings.Contains(selector.CEL, name) && together(c.Paths[i].Nodes, selector.Nodes) {
			return InvalidField(at, "is %q, as paths[%d].name is; want another name, or a cel that selects those devices by their attribute resource", name, i)
		}
	}
	return nil
}
