package pool

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// publishedAttributes returns the attributes of a device. If the server keeps lists (KEP-5491), a
// list replaces the string or number of the same name. A list beyond the limits is omitted, and its
// string or number remains.
func (in *input) publishedAttributes(d *rules.Offered) discovery.Attributes {
	if !in.Features.Lists || len(d.Lists) == 0 {
		return d.Attributes
	}
	out := maps.Clone(d.Attributes)
	if out == nil {
		out = make(discovery.Attributes)
	}
	room := resourceapi.ResourceSliceMaxAttributeValuesPerDevice - len(out)
	most := resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice - len(d.Capacity)
	if len(d.Takes) > 0 { // room for the partition type
		room--
		most--
	}
	for _, name := range slices.Sorted(maps.Keys(d.Lists)) {
		values := valuesOf(d.Lists[name])
		if _, replaced := out[name]; replaced {
			values--
		} else if len(out) >= most {
			continue
		}
		if values <= room {
			out[name] = d.Lists[name]
			room -= values
		}
	}
	return out
}

// valuesOf returns the number of values of an attribute.
func valuesOf(a resourceapi.DeviceAttribute) int {
	if n := len(a.IntValues) + len(a.BoolValues) + len(a.StringValues) + len(a.VersionValues); n > 0 {
		return n
	}
	return 1
}

// withoutLists returns the attributes without the list attributes.
func withoutLists(attributes discovery.Attributes) discovery.Attributes {
	out := maps.Clone(attributes)
	maps.DeleteFunc(out, func(_ resourceapi.QualifiedName, a resourceapi.DeviceAttribute) bool {
		return a.IntValues != nil || a.BoolValues != nil || a.StringValues != nil || a.VersionValues != nil
	})
	return out
}
