package discovery

import (
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// SetNames sets an attribute to several names. The string value joins the names with commas. It is
// left out if the text exceeds the API's length limit, because a shortened text would hide names.
// Several names are also set as a list, which has no limit for the total length, unless a name
// exceeds the limit alone.
func (d *Device) SetNames(name resourceapi.QualifiedName, names []string) {
	if value := strings.Join(names, ","); len(value) <= resourceapi.DeviceAttributeMaxValueLength {
		d.Attributes.SetString(name, value)
	}
	long := func(name string) bool { return len(name) > resourceapi.DeviceAttributeMaxValueLength }
	if len(names) > 1 && !slices.ContainsFunc(names, long) {
		d.SetList(name, resourceapi.DeviceAttribute{StringValues: names})
	}
}

// Names returns the names set by [Device.SetNames]. The result is nil without any names, or if the
// names exceeded the limits of both the string and the list.
func (d *Device) Names(name resourceapi.QualifiedName) []string {
	if list := d.Lists[name].StringValues; list != nil {
		return list
	}
	if value := d.Attributes.String(name); value != "" {
		return strings.Split(value, ",")
	}
	return nil
}

// SetList sets a list. Copies of a device share the map, so SetList clones the map first.
func (d *Device) SetList(name resourceapi.QualifiedName, list resourceapi.DeviceAttribute) {
	d.Lists = maps.Clone(d.Lists)
	if d.Lists == nil {
		d.Lists = make(Lists)
	}
	d.Lists[name] = list
}
