package web

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
)

// attribute is one published attribute or capacity of a device.
type attribute struct{ Name, Value, Small string }

// attributesOf returns the published attributes and capacities of a device. The standard attributes
// of Kubernetes come first.
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
		all = append(all, attribute{Name: strings.TrimPrefix(name, standard), Value: strings.Join(discovery.Values(d.Offered.Attributes[resourceapi.QualifiedName(name)].ForSlice()), ", ")})
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
