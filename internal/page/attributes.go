package page

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// attribute is a line of what is published of a device.
type attribute struct{ Name, Value, Small string }

// attributesOf returns what is published of a device, those of Kubernetes first.
func attributesOf(d *device) (all []attribute) {
	names := make([]string, 0, len(d.Offered.Attributes))
	for name := range d.Offered.Attributes {
		names = append(names, string(name))
	}
	const standard = "resource.kubernetes.io/"
	slices.SortFunc(names, func(a, b string) int {
		if x, y := strings.HasPrefix(a, standard), strings.HasPrefix(b, standard); x != y {
			if x {
				return -1
			}
			return 1
		}
		return strings.Compare(a, b)
	})
	for _, name := range names {
		all = append(all, attribute{Name: strings.TrimPrefix(name, standard), Value: valueOf(d.Offered.Attributes[resourceapi.QualifiedName(name)])})
	}
	names = names[:0]
	for name := range d.Offered.Capacity {
		names = append(names, string(name))
	}
	slices.Sort(names)
	for _, name := range names {
		capacity := d.Offered.Capacity[resourceapi.QualifiedName(name)].Value
		all = append(all, attribute{Name: name, Value: capacity.String(), Small: "capacity"})
	}
	return all
}

func valueOf(value resourceapi.DeviceAttribute) string {
	switch {
	case value.StringValue != nil:
		return *value.StringValue
	case value.IntValue != nil:
		return strconv.FormatInt(*value.IntValue, 10)
	case value.BoolValue != nil:
		return strconv.FormatBool(*value.BoolValue)
	case value.VersionValue != nil:
		return *value.VersionValue
	case value.StringValues != nil:
		return strings.Join(value.StringValues, ", ")
	case value.IntValues != nil:
		return strings.Trim(fmt.Sprint(value.IntValues), "[]")
	}
	return ""
}
