package pool

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery/rules"
)

// addLists replaces strings and numbers by the lists of the same name. A list beyond the limits is
// omitted, and its string or number remains.
func addLists(out, lists map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, d *rules.Offered) {
	room := resourceapi.ResourceSliceMaxAttributeValuesPerDevice - len(out)
	most := resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice - len(d.Capacity)
	if len(d.Takes) > 0 { // room for the partition type
		room--
		most--
	}
	for _, name := range slices.Sorted(maps.Keys(lists)) {
		values := valuesOf(lists[name])
		if _, replaced := out[name]; replaced {
			values--
		} else if len(out) >= most {
			continue
		}
		if values <= room {
			out[name] = lists[name]
			room -= values
		}
	}
}

// valuesOf returns the number of values of an attribute.
func valuesOf(a resourceapi.DeviceAttribute) int {
	if n := len(a.IntValues) + len(a.BoolValues) + len(a.StringValues) + len(a.VersionValues); n > 0 {
		return n
	}
	return 1
}

// withoutLists returns the attributes without the list attributes.
func withoutLists(attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	out := maps.Clone(attributes)
	maps.DeleteFunc(out, func(_ resourceapi.QualifiedName, a resourceapi.DeviceAttribute) bool {
		return a.IntValues != nil || a.BoolValues != nil || a.StringValues != nil || a.VersionValues != nil
	})
	return out
}
