package placement

import (
	"maps"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery/rules"
)

// crowdedDevices returns the devices of the device plugin API that do not fit, and so are not
// created. Partitions of one physical device may overlap, and the configuration may list more
// partitions than fit. Existing devices take precedence, then devices in the order of their names,
// so that the result is stable.
func crowdedDevices(devices []rules.Offered) map[string]bool {
	left := make(map[string]map[string]resource.Quantity) // by silicon
	without := make(map[string]bool)
	for _, there := range []bool{true, false} {
		for i := range devices {
			d := &devices[i]
			if len(d.Offers) == 0 || d.PartOf == nil || len(d.Takes) == 0 || (d.Creation == nil) != there {
				continue
			}
			silicon := d.Silicon()
			if left[silicon] == nil {
				left[silicon] = maps.Clone(d.PartOf.Counters)
			}
			if !there && exceedsLeft(d.Takes, left[silicon]) {
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

// exceedsLeft reports whether a device takes more of any counter than is left.
func exceedsLeft(takes, left map[string]resource.Quantity) bool {
	for name, value := range takes {
		if there := left[name]; value.Cmp(there) > 0 {
			return true
		}
	}
	return false
}
