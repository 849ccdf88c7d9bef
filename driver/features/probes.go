package features

import (
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
)

// probe is a test for an optional field. The server keeps, drops or refuses the field.
type probe struct {
	feature string
	device  resourceapi.Device
	kept    func(madeSlice) bool
}

// madeSlice is a probe's device and slice as the server would store them.
type madeSlice struct {
	resourceapi.Device
	slice *resourceapi.ResourceSliceSpec
}

// Names in slices of dry runs.
const (
	probeSet   = "silicon" // counter set of the probes
	probeTyped = "typed"   // device in the slice with partition types
)

// probeType is the attribute with the partition type.
const probeType resourceapi.FullyQualifiedName = discovery.Domain + "/partitionType"

func probeCounters() map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{"slices": {Value: resource.MustParse("1")}}
}

// probePart returns a device with counters and a partition type. If one such device of a slice has
// a partition type, all of them must have one.
func probePart(name string) resourceapi.Device {
	return resourceapi.Device{
		Name:             name,
		Attributes:       map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"partitionType": {StringValue: new("part")}},
		ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: probeSet, Counters: probeCounters()}},
	}
}

func consumesCounters(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 }

// listProbe returns the probe for lists, which needs a slice of its own. A server that drops lists
// refuses the remaining attribute without a value, and all servers without alpha features drop
// lists.
func listProbe() []probe {
	return []probe{{
		"DRAListTypeAttributes",
		resourceapi.Device{Name: "listed", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"linkedTo": {StringValues: []string{"a", "b"}}}},
		func(d madeSlice) bool { return len(d.Attributes["linkedTo"].StringValues) > 0 },
	}}
}

// mixedProbe returns a device that is valid only if the server drops lists, which is the default. With
// it, one slice is enough for such servers.
func mixedProbe() probe {
	lists := listProbe()[0]
	lists.device.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"linkedTo": {StringValue: new("a"), StringValues: []string{"a", "b"}}}
	return lists
}

// fieldProbes returns a probe for each other optional field.
func fieldProbes() []probe {
	taint := func(effect resourceapi.DeviceTaintEffect) []resourceapi.DeviceTaint {
		return []resourceapi.DeviceTaint{{Key: discovery.Domain + "/unhealthy", Effect: effect}}
	}
	tainted := func(d madeSlice) bool { return len(d.Taints) > 0 }
	grouped := probePart("grouped")
	grouped.ConsumesCounters[0].CompatibilityGroups = []string{"parts"}
	one := resource.MustParse("1")
	return []probe{
		{
			"DRANodeAllocatableResources",
			resourceapi.Device{Name: "needy", NodeAllocatableResources: map[corev1.ResourceName]resourceapi.NodeAllocatableResource{
				corev1.ResourceMemory: {Overhead: &resourceapi.NodeAllocatableOverhead{PerPod: &one}},
			}},
			func(d madeSlice) bool {
				return d.NodeAllocatableResources[corev1.ResourceMemory].Overhead != nil
			},
		},
		{
			"DRADeviceBindingConditions",
			resourceapi.Device{Name: "bound", BindingConditions: []string{"chandler.dev/ready"}, BindingFailureConditions: []string{"chandler.dev/failed"}},
			func(d madeSlice) bool { return len(d.BindingConditions) > 0 },
		},
		{"DRADeviceTaints", resourceapi.Device{Name: "sick", Taints: taint(resourceapi.DeviceTaintEffectNoSchedule)}, tainted},
		{"DeviceTaintEffectNone", resourceapi.Device{Name: "told", Taints: taint(resourceapi.DeviceTaintEffectNone)}, tainted},
		{
			"DRAConsumableCapacity",
			resourceapi.Device{Name: "shared", AllowMultipleAllocations: new(true), Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
				discovery.Shares: {Value: one, RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one}},
			}},
			func(d madeSlice) bool {
				return d.AllowMultipleAllocations != nil && d.Capacity[discovery.Shares].RequestPolicy != nil
			},
		},
		{"DRAPartitionableDevices", probePart("part"), func(d madeSlice) bool { return consumesCounters(d.Device) }},
		{"DRADeviceCompatibilityGroups", grouped, func(d madeSlice) bool {
			return consumesCounters(d.Device) && len(d.ConsumesCounters[0].CompatibilityGroups) > 0
		}},
		{"DRAPartitionableDevicesType", probePart(probeTyped), func(d madeSlice) bool {
			return d.slice.PartitionTypeAttribute != nil
		}},
	}
}

// findTogether sets the features that the server keeps, by one slice with all probes.
func (s *Set) findTogether(create create, probes []probe) error {
	var spec resourceapi.ResourceSliceSpec
	for _, p := range probes {
		spec.Devices = append(spec.Devices, p.device)
		if p.device.Name == probeTyped {
			spec.PartitionTypeAttribute = new(probeType)
		}
	}
	slice, err := create(spec)
	if err != nil {
		return err
	}
	devices := make(map[string]resourceapi.Device)
	for _, device := range slice.Devices {
		devices[device.Name] = device
	}
	for _, p := range probes {
		s.set(p.feature, p.kept(madeSlice{devices[p.device.Name], slice}))
	}
	return nil
}

// find sets the features that the server keeps. If the server refuses all probes together, find
// tries each probe alone, unless the server also refuses a slice without optional fields.
func (s *Set) find(create create, refused func() error, probes []probe) error {
	err := s.findTogether(create, probes)
	if !apierrors.IsInvalid(err) {
		return err
	}
	if len(probes) == 1 {
		return nil
	}
	if err := refused(); err != nil {
		return err
	}
	for _, p := range probes {
		if err := s.find(create, refused, []probe{p}); err != nil {
			return err
		}
	}
	return nil
}
