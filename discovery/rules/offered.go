// Package rules says what the administrator makes of the devices of a host: which
// of them are offered, by which API and names, and how they are shared. It knows
// no vendor, reads no host and asks nobody.
package rules

import (
	"encoding/json"
	"slices"
	"sort"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"

	"chandler.dev/discovery"
)

// Offered is a device as the administrator wants it offered. Its Attributes,
// Capacity and Edits are those of the device as it is shared and named.
type Offered struct {
	discovery.Device

	// Sharing says how several containers have the device together, nil if one
	// has it alone.
	Sharing *Sharing `json:"sharing,omitempty"`

	// Overhead is what each user of the device needs of the host, nil if nothing.
	Overhead HostResources `json:"overhead,omitempty"`

	// Mode is the API that is to offer the device.
	Mode discovery.Mode `json:"mode,omitempty"`

	// Want is what the device is to be before the classic API lists it.
	Want discovery.Parameters `json:"want,omitempty"`

	// Offers are what the device is offered as in the classic API: those of its
	// Classic that are named, with an ID for each share.
	Offers []discovery.Offer `json:"offers,omitempty"`
}

// Resource returns the classic resource name of the device, "" if it has none,
// or several.
func (d *Offered) Resource() string {
	if len(d.Offers) == 1 {
		return d.Offers[0].Resource
	}
	return ""
}

// ResourceOf returns the classic resource name that all of the devices have, ""
// if they have none or several.
func ResourceOf(devices []Offered) string {
	name := devices[0].Resource()
	if slices.ContainsFunc(devices, func(d Offered) bool { return d.Resource() != name }) {
		return ""
	}
	return name
}

// Devices returns the devices without what the rules add.
func Devices(offered []Offered) []discovery.Device {
	devices := make([]discovery.Device, len(offered))
	for i := range offered {
		devices[i] = offered[i].Device
	}
	return devices
}

// Snapshot is all devices of a host that are offered, at one moment. It is never
// modified.
type Snapshot struct {
	Devices  []Offered // in name order
	Problems []discovery.Problem
	Gone     discovery.Missing

	Allocation map[string]Allocation // by classic resource
}

// Lookup returns the device of that name.
func (s *Snapshot) Lookup(name string) (Offered, bool) {
	i, found := sort.Find(len(s.Devices), func(i int) int { return strings.Compare(name, s.Devices[i].Name) })
	if !found {
		return Offered{}, false
	}
	return s.Devices[i], true
}

// Same reports whether two snapshots say the same, so that a reader need only be
// told of changes.
func Same(a, b *Snapshot) bool {
	if a == nil || b == nil {
		return a == b
	}
	return equality.Semantic.DeepEqual(a.Devices, b.Devices) && equality.Semantic.DeepEqual(a.Allocation, b.Allocation) &&
		slices.EqualFunc(a.Problems, b.Problems, func(p, q discovery.Problem) bool { return p.Error() == q.Error() })
}

// MarshalJSON writes {"devices":[…],"problems":[…]}, both always there.
func (s *Snapshot) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Devices  []Offered           `json:"devices"`
		Problems []discovery.Problem `json:"problems"`
	}{append([]Offered{}, s.Devices...), append([]discovery.Problem{}, s.Problems...)})
}
