package features

// Set contains the optional fields of ResourceSlices that an API server is known to keep. The zero
// value is for a server with unknown features, to which only the required fields are published.
// Whatever the set, the published slices never allow two claims to have the same physical device.
type Set struct {
	Overhead       bool // else the host resources needed by consumers are not charged
	Groups         bool // else counters alone express which devices exclude each other
	PartitionType  bool // else the status of a pool does not count competing devices by type
	Lists          bool // else an attribute with several values is a string with commas, or has the first value
	Bindings       bool // not used: no device waits for conditions before pods are bound
	Sharing        bool // else a device shared by number is published as several numbered devices, a device shared by amount once, and interchangeable devices one by one
	Separate       bool // else each counter set is in one slice with all its consumers
	Counters       bool // else only those competing devices are published that can all be allocated together
	NoEffectTaints bool // else taints without an effect are left out
	Taints         bool // else unhealthy devices are left out
}

// A Feature is an optional part of ResourceSlices that an API server keeps or drops.
type Feature struct {
	Name string // the feature gate, or a name of Chandler for a change without a gate
	Kept bool
}

// All returns the set of a server with all features.
func All() (s Set) {
	for _, f := range s.fields() {
		*f.kept = true
	}
	return s
}

// AllFeatures returns all features, beginning with the most dispensable.
func (s Set) AllFeatures() (features []Feature) {
	for _, f := range s.fields() {
		features = append(features, Feature{f.name, *f.kept})
	}
	return features
}

// WithoutFeatures returns the set without some features, by name. Unknown names are ignored, since
// their fields are never published.
func (s Set) WithoutFeatures(names ...string) Set {
	for _, name := range names {
		s.set(name, false)
	}
	return s
}

// MissingNames names the features absent from the set, for logs.
func (s Set) MissingNames() []string {
	names := []string{}
	for _, f := range s.AllFeatures() {
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

// fields returns the fields with the names of their feature gates. Two fields have no gate and
// depend on the version: 1.35 introduced counters in slices of their own and taints without an
// effect.
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
		{"DeviceTaintEffectNone", &s.NoEffectTaints},
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
