package agent

import (
	"maps"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery/rules"
)

// crowded returns the devices of the classic API for which there is no room, so that they are not
// to be made. Parts that could be made of one piece of silicon may overlap, and the administrator
// may have named more of them than fit. Those that are there come first, and then those that come
// first by their names, so that it is always the same ones that fit.
func crowded(devices []rules.Offered) map[string]bool {
	left := make(map[string]map[string]resource.Quantity) // by silicon
	without := make(map[string]bool)
	for _, there := range []bool{true, false} {
		for i := range devices {
			d := &devices[i]
			if len(d.Offers) == 0 || d.PartOf == nil || len(d.Takes) == 0 || (d.Making == nil) != there {
				continue
			}
			silicon := d.Silicon()
			if left[silicon] == nil {
				left[silicon] = maps.Clone(d.PartOf.Counters)
			}
			if !there && exceeds(d.Takes, left[silicon]) {
				without[d.Name] = true
				continue
			}
			for name, value := range d.Takes {
				now := left[silicon][name].DeepCopy()
				now.Sub(value)
				left[silicon][name] = now
			}
		}
	}
	return without
}

// exceeds reports whether something takes more than there is.
func exceeds(takes, left map[string]resource.Quantity) bool {
	for name, value := range takes {
		if there := left[name]; value.Cmp(there) > 0 {
			return true
		}
	}
	return false
}
