package apiserver

import (
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// keepFields removes from an object the fields that the server does not keep, and returns an error
// if the server rejects the object. A field of the previous object stays, as with the server's own
// strategies (pkg/registry/resource/resourceslice/strategy.go, dropDisabledFields).
func (s *Server) keepFields(o object, before object) error {
	slice, is := o.(*resourceapi.ResourceSlice)
	if !is {
		return nil
	}
	var had features
	if old, is := before.(*resourceapi.ResourceSlice); is {
		had = featuresOf(&old.Spec)
	}
	s.dropFields(&slice.Spec, had)
	if problems := s.refuseSlice(&slice.Spec); len(problems) > 0 {
		return apierrors.NewInvalid(schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}, slice.Name, problems)
	}
	return nil
}

// features are the features that a slice already uses.
type features struct{ taints, counters, sharing, lists, overhead, groups, types, bindings bool }

func featuresOf(spec *resourceapi.ResourceSliceSpec) (f features) {
	f.counters = len(spec.SharedCounters) > 0
	f.types = spec.PartitionTypeAttribute != nil
	for i := range spec.Devices {
		d := &spec.Devices[i]
		f.taints = f.taints || len(d.Taints) > 0
		f.counters = f.counters || len(d.ConsumesCounters) > 0
		f.sharing = f.sharing || d.AllowMultipleAllocations != nil
		f.overhead = f.overhead || len(d.NodeAllocatableResources) > 0
		f.bindings = f.bindings || len(d.BindingConditions) > 0
		for _, c := range d.ConsumesCounters {
			f.groups = f.groups || len(c.CompatibilityGroups) > 0
		}
		for _, a := range d.Attributes {
			f.lists = f.lists || len(a.StringValues)+len(a.IntValues)+len(a.BoolValues)+len(a.VersionValues) > 0
		}
	}
	return f
}

// dropFields removes the fields that the server does not keep.
func (s *Server) dropFields(spec *resourceapi.ResourceSliceSpec, had features) {
	keeps := s.features
	if !keeps.Counters && !had.counters {
		spec.SharedCounters = nil
	}
	if !keeps.Types && !had.types || !keeps.Counters {
		spec.PartitionTypeAttribute = nil
	}
	for i := range spec.Devices {
		d := &spec.Devices[i]
		if !keeps.Taints && !had.taints {
			d.Taints = nil
		}
		if !keeps.Counters && !had.counters {
			d.ConsumesCounters = nil
		}
		for j := range d.ConsumesCounters {
			if !keeps.Groups && !had.groups {
				d.ConsumesCounters[j].CompatibilityGroups = nil
			}
		}
		if !keeps.Sharing && !had.sharing {
			d.AllowMultipleAllocations = nil
			for name, capacity := range d.Capacity {
				capacity.RequestPolicy = nil
				d.Capacity[name] = capacity
			}
		}
		if !keeps.Overhead && !had.overhead {
			d.NodeAllocatableResources = nil
		}
		if !keeps.Bindings && !had.bindings {
			d.BindingConditions, d.BindingFailureConditions, d.BindsToNode = nil, nil, nil
		}
		for name, a := range d.Attributes {
			if !keeps.Lists && !had.lists {
				a.StringValues, a.IntValues, a.BoolValues, a.VersionValues = nil, nil, nil, nil
				d.Attributes[name] = a
			}
		}
	}
}

// refuseSlice returns the server's reasons to reject a slice: values that an older server does not
// have, and objects without a value after drop.
func (s *Server) refuseSlice(spec *resourceapi.ResourceSliceSpec) (problems field.ErrorList) {
	path := field.NewPath("spec")
	limit := resourceapi.ResourceSliceMaxDevices
	if len(spec.Devices) > limit {
		problems = append(problems, field.TooMany(path.Child("devices"), len(spec.Devices), limit))
	}
	if s.features.Separate && len(spec.SharedCounters) > 0 && len(spec.Devices) > 0 {
		problems = append(problems, field.Invalid(path, "", "devices and sharedCounters are in slices of their own"))
	}
	sets := make(map[string]bool)
	for _, set := range spec.SharedCounters {
		sets[set.Name] = true
	}
	for i := range spec.Devices {
		d := &spec.Devices[i]
		at := path.Child("devices").Index(i)
		for _, taint := range d.Taints {
			if taint.Effect == resourceapi.DeviceTaintEffectNone && !s.features.NoneEffect {
				problems = append(problems, field.NotSupported(at.Child("taints"), taint.Effect, []resourceapi.DeviceTaintEffect{resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute}))
			}
		}
		for _, c := range d.ConsumesCounters {
			if !s.features.Separate && !sets[c.CounterSet] {
				problems = append(problems, field.Invalid(at.Child("consumesCounters"), c.CounterSet, "the counter set is not in the slice"))
			}
		}
		for name, a := range d.Attributes {
			if a.StringValue == nil && a.IntValue == nil && a.BoolValue == nil && a.VersionValue == nil &&
				len(a.StringValues)+len(a.IntValues)+len(a.BoolValues)+len(a.VersionValues) == 0 {
				problems = append(problems, field.Required(at.Child("attributes").Key(string(name)), "exactly one value must be specified"))
			}
		}
	}
	return problems
}
