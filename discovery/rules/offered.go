// Package rules applies the administrator's configuration to the devices of a host. It selects the
// offered devices, and sets their API, names and sharing. The package depends on no vendor and does
// no I/O.
package rules

import (
	"encoding/json"
	"slices"
	"sort"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"chandler.dev/discovery"
)

// Offered is a device with the administrator's rules applied. Its Attributes, Capacity and Edits
// include sharing and names.
type Offered struct {
	discovery.Device

	// Sharing defines how several containers share the device, nil for exclusive use.
	Sharing *Sharing `json:"sharing,omitempty"`

	// Overhead is the host resources that each consumer of the device needs, nil for none.
	Overhead HostResources `json:"overhead,omitempty"`

	// Mode is the API that should offer the device.
	Mode discovery.Mode `json:"mode,omitempty"`

	// ModeReason is why Mode is not the one of the configuration, or "".
	ModeReason string `json:"modeReason,omitempty"`

	// Want is the required configuration of the device before the device plugin API lists it.
	Want discovery.Parameters `json:"want,omitempty"`

	// Offers are the offers of the device in the device plugin API: the offers in PluginOffers that
	// have a name, with an ID for each share.
	Offers []discovery.Offer `json:"offers,omitempty"`
}

// Resource returns the extended resource of the device, "" if the device has none or several.
func (d *Offered) Resource() string {
	if len(d.Offers) == 1 {
		return d.Offers[0].Resource
	}
	return ""
}

// ResourceOf returns the extended resource of all of the devices, "" if the devices have none or
// several.
func ResourceOf(devices []Offered) string {
	name := devices[0].Resource()
	if slices.ContainsFunc(devices, func(d Offered) bool { return d.Resource() != name }) {
		return ""
	}
	return name
}

// PlainDevices returns the devices without the properties that the rules add.
func PlainDevices(offered []Offered) []discovery.Device {
	devices := make([]discovery.Device, len(offered))
	for i := range offered {
		devices[i] = offered[i].Device
	}
	return devices
}

// Snapshot contains all offered devices of a host at one moment. A Snapshot is never modified.
type Snapshot struct {
	Devices  []Offered // in name order
	Problems []discovery.Problem
	Gone     discovery.Missing

	Allocation map[string]Allocation // by extended resource

	Attributes []resourceapi.QualifiedName // as in [Rules]
}

// Lookup returns the device with the given name.
func (s *Snapshot) Lookup(name string) (Offered, bool) {
	i, found := sort.Find(len(s.Devices), func(i int) int { return strings.Compare(name, s.Devices[i].Name) })
	if !found {
		return Offered{}, false
	}
	return s.Devices[i], true
}

// SameSnapshots reports whether two snapshots have the same devices, settings and problems, so
// readers can ignore snapshots without changes.
func SameSnapshots(a, b *Snapshot) bool {
	if a == nil || b == nil {
		return a == b
	}
	return equality.Semantic.DeepEqual(a.Devices, b.Devices) && equality.Semantic.DeepEqual(a.Allocation, b.Allocation) &&
		slices.Equal(a.Attributes, b.Attributes) &&
		slices.EqualFunc(a.Problems, b.Problems, func(p, q discovery.Problem) bool { return p.Error() == q.Error() })
}

// MarshalJSON writes {"devices":[…],"problems":[…]}. Both fields are always present.
func (s *Snapshot) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Devices  []Offered           `json:"devices"`
		Problems []discovery.Problem `json:"problems"`
	}{append([]Offered{}, s.Devices...), append([]discovery.Problem{}, s.Problems...)})
}
