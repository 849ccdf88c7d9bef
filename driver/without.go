package driver

// Without says which optional fields of a ResourceSlice the API server drops or
// does not take. The zero value is a server that keeps all. What else is
// published where one is missing never lets two claims have the same silicon.
type Without struct {
	Overhead      bool // what users of devices need of the host is not charged
	Groups        bool // counters alone say which devices exclude each other
	PartitionType bool // the status of a pool does not count devices that compete by type
	Lists         bool // attributes with several values are strings with commas, or have the first value
	Bindings      bool // nothing: no device waits for conditions before pods are bound
	Taints        bool // unhealthy devices are left out
	Told          bool // taints without an effect are left out
	Counters      bool // of devices that compete, only such as can all be given out are published
	Separate      bool // counters are in one slice with all devices that take of them
	Sharing       bool // a device shared by number is published as several numbered ones, one shared by amount as one
}

// A Feature is what an API server keeps of ResourceSlices or drops.
type Feature struct {
	Name string // of the feature gate, or of what came with a version and has none
	Kept bool
}

// Features returns what is kept and what is not, what is given up first at the
// beginning.
func (w Without) Features() (features []Feature) {
	for _, f := range w.fields() {
		features = append(features, Feature{f.name, !*f.dropped})
	}
	return features
}

type field struct {
	name    string
	dropped *bool
}

// fields returns the fields with the feature gates that they depend on, or what
// it takes otherwise: 1.35 brought counters in slices of their own and taints
// that have no effect.
func (w *Without) fields() []field {
	return []field{
		{"DRANodeAllocatableResources", &w.Overhead},
		{"DRADeviceCompatibilityGroups", &w.Groups},
		{"DRAPartitionableDevicesType", &w.PartitionType},
		{"DRAListTypeAttributes", &w.Lists},
		{"DRADeviceBindingConditions", &w.Bindings},
		{"DRAConsumableCapacity", &w.Sharing},
		{"SeparateCounters", &w.Separate},
		{"DRAPartitionableDevices", &w.Counters},
		{"DeviceTaintEffectNone", &w.Told},
		{"DRADeviceTaints", &w.Taints},
	}
}

// add notes a feature that is off, by its name. What it does not know, it does
// not publish either.
func (w *Without) add(name string) {
	for _, f := range w.fields() {
		if f.name == name {
			*f.dropped = true
		}
	}
}

// or returns what either says is dropped.
func (w Without) or(other Without) Without {
	for _, f := range other.fields() {
		if *f.dropped {
			w.add(f.name)
		}
	}
	return w
}

// names returns what is dropped, for a log.
func (w Without) names() []string {
	names := []string{}
	for _, f := range w.fields() {
		if *f.dropped {
			names = append(names, f.name)
		}
	}
	return names
}
