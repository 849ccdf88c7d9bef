// Package features finds out which optional fields of a ResourceSlice an API
// server keeps. It publishes nothing and knows no device.
package features

// Set says which optional fields of a ResourceSlice an API server is known to
// keep. The zero value is a server of which nothing is known: to it the least is
// published. Whatever the set, what is published never lets two claims have the
// same silicon.
type Set struct {
	Overhead      bool // else what users of devices need of the host is not charged
	Groups        bool // else counters alone say which devices exclude each other
	PartitionType bool // else the status of a pool does not count devices that compete by type
	Lists         bool // else attributes with several values are strings with commas, or have the first value
	Bindings      bool // not used: no device waits for conditions before pods are bound
	Sharing       bool // else a device shared by number is published as several numbered ones, one shared by amount as one
	Separate      bool // else counters are in one slice with all devices that take of them
	Counters      bool // else of devices that compete, only such as can all be given out are published
	Told          bool // else taints without an effect are left out
	Taints        bool // else unhealthy devices are left out
}

// A Feature is what an API server keeps of ResourceSlices or drops.
type Feature struct {
	Name string // of the feature gate, or of what came with a version and has none
	Kept bool
}

// All returns the set of a server that keeps everything.
func All() (s Set) {
	for _, f := range s.fields() {
		*f.kept = true
	}
	return s
}

// List returns what is kept and what is not, what is given up first at the
// beginning.
func (s Set) List() (features []Feature) {
	for _, f := range s.fields() {
		features = append(features, Feature{f.name, *f.kept})
	}
	return features
}

// Without returns the set less some features, by their names. Names that it does
// not know are of fields that are never published.
func (s Set) Without(names ...string) Set {
	for _, name := range names {
		s.set(name, false)
	}
	return s
}

// Missing names the features that are not in the set, for a log.
func (s Set) Missing() []string {
	names := []string{}
	for _, f := range s.List() {
		if !f.Kept {
			names = append(names, f.Name)
		}
	}
	return names
}

type field struct {
	name string
	kept *bool
}

// fields returns the fields with the feature gates that they depend on, or what
// it takes otherwise: 1.35 brought counters in slices of their own and taints
// that have no effect.
func (s *Set) fields() []field {
	return []field{
		{"DRANodeAllocatableResources", &s.Overhead},
		{"DRADeviceCompatibilityGroups", &s.Groups},
		{"DRAPartitionableDevicesType", &s.PartitionType},
		{"DRAListTypeAttributes", &s.Lists},
		{"DRADeviceBindingConditions", &s.Bindings},
		{"DRAConsumableCapacity", &s.Sharing},
		{"SeparateCounters", &s.Separate},
		{"DRAPartitionableDevices", &s.Counters},
		{"DeviceTaintEffectNone", &s.Told},
		{"DRADeviceTaints", &s.Taints},
	}
}

func (s *Set) set(name string, kept bool) {
	for _, f := range s.fields() {
		if f.name == name {
			*f.kept = kept
		}
	}
}
