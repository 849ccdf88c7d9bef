package features_test

import (
	"errors"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
)

// refusing returns a change for [pooltest.ChangingServer] that refuses some slices as invalid.
func refusing(invalid func(*resourceapi.ResourceSlice) bool) func(*resourceapi.ResourceSlice) error {
	return func(slice *resourceapi.ResourceSlice) error {
		if invalid(slice) {
			return apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "", nil)
		}
		return nil
	}
}

// effectless reports whether a device has a taint without an effect.
func effectless(slice *resourceapi.ResourceSlice) bool {
	return slices.ContainsFunc(slice.Spec.Devices, func(d resourceapi.Device) bool {
		return len(d.Taints) > 0 && d.Taints[0].Effect == resourceapi.DeviceTaintEffectNone
	})
}

func consumes(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 }

// apart reports whether a device consumes counters of another slice.
func apart(slice *resourceapi.ResourceSlice) bool {
	return len(slice.Spec.SharedCounters) == 0 && slices.ContainsFunc(slice.Spec.Devices, consumes)
}

// listed reports whether an attribute is a list.
func listed(slice *resourceapi.ResourceSlice) bool {
	return slices.ContainsFunc(slice.Spec.Devices, func(d resourceapi.Device) bool {
		for _, a := range d.Attributes {
			if a.StringValues != nil {
				return true
			}
		}
		return false
	})
}

func withoutGroups(slice *resourceapi.ResourceSlice) error {
	for i := range slice.Spec.Devices {
		for j := range slice.Spec.Devices[i].ConsumesCounters {
			slice.Spec.Devices[i].ConsumesCounters[j].CompatibilityGroups = nil
		}
	}
	return nil
}

func TestAsk(t *testing.T) {
	each := func(change func(*resourceapi.Device)) func(*resourceapi.ResourceSlice) error {
		return func(slice *resourceapi.ResourceSlice) error {
			for i := range slice.Spec.Devices {
				change(&slice.Spec.Devices[i])
			}
			return nil
		}
	}
	tests := map[string]struct {
		server  func(*resourceapi.ResourceSlice) error
		dropped []string
	}{
		"keeps all":        {server: each(func(*resourceapi.Device) {})},
		"drops taints":     {server: each(func(d *resourceapi.Device) { d.Taints = nil }), dropped: []string{"DRADeviceTaints", "DeviceTaintEffectNone"}},
		"drops policies":   {server: each(func(d *resourceapi.Device) { d.Capacity = nil }), dropped: []string{"DRAConsumableCapacity"}},
		"drops sharing":    {server: each(func(d *resourceapi.Device) { d.AllowMultipleAllocations = nil }), dropped: []string{"DRAConsumableCapacity"}},
		"drops counters":   {server: pooltest.WithoutCounters, dropped: []string{"DRAPartitionableDevices", "SeparateCounters", "DRADeviceCompatibilityGroups", "DRAPartitionableDevicesType"}},
		"drops overhead":   {server: each(func(d *resourceapi.Device) { d.NodeAllocatableResources = nil }), dropped: []string{"DRANodeAllocatableResources"}},
		"drops conditions": {server: each(func(d *resourceapi.Device) { d.BindingConditions, d.BindingFailureConditions = nil, nil }), dropped: []string{"DRADeviceBindingConditions"}},
		"drops types":      {server: func(s *resourceapi.ResourceSlice) error { s.Spec.PartitionTypeAttribute = nil; return nil }, dropped: []string{"DRAPartitionableDevicesType"}},
		"drops groups":     {server: withoutGroups, dropped: []string{"DRADeviceCompatibilityGroups"}},
		"refuses lists":    {server: refusing(listed), dropped: []string{"DRAListTypeAttributes"}},
		"1.34 with all that it has": {
			server:  refusing(func(slice *resourceapi.ResourceSlice) bool { return effectless(slice) || apart(slice) || listed(slice) }),
			dropped: []string{"DRAListTypeAttributes", "DRADeviceCompatibilityGroups", "DRAPartitionableDevicesType", "DeviceTaintEffectNone", "SeparateCounters"},
		},
		"1.34 as it comes": {
			server: func(slice *resourceapi.ResourceSlice) error {
				return errors.Join(pooltest.WithoutCounters(slice), each(func(d *resourceapi.Device) {
					d.Taints, d.AllowMultipleAllocations, d.NodeAllocatableResources = nil, nil, nil
				})(slice))
			},
			dropped: []string{"DRANodeAllocatableResources", "DRADeviceCompatibilityGroups", "DRAPartitionableDevicesType", "DRADeviceTaints", "DeviceTaintEffectNone", "DRAPartitionableDevices", "SeparateCounters", "DRAConsumableCapacity"},
		},
		"refuses counters anyhow": {
			server:  refusing(func(slice *resourceapi.ResourceSlice) bool { return slices.ContainsFunc(slice.Spec.Devices, consumes) }),
			dropped: []string{"DRAPartitionableDevices", "SeparateCounters", "DRADeviceCompatibilityGroups", "DRAPartitionableDevicesType"},
		},
		"before taints without an effect": {server: refusing(effectless), dropped: []string{"DeviceTaintEffectNone"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			kept, err := features.DetectFeatures(t.Context(), pooltest.ChangingServer(t, test.server), "node")
			if want := features.All().WithoutFeatures(test.dropped...); err != nil || kept != want {
				t.Errorf("got %+v, want %+v; error %v", kept, want, err)
			}
		})
	}
}

// A server that drops lists, as by default, receives one request. Only servers that keep lists or
// refuse other fields receive more.
func TestOneRequestByDefault(t *testing.T) {
	dropLists := func(slice *resourceapi.ResourceSlice) error {
		for i := range slice.Spec.Devices {
			for name, a := range slice.Spec.Devices[i].Attributes {
				a.StringValues = nil
				slice.Spec.Devices[i].Attributes[name] = a
			}
		}
		return nil
	}
	keepLists := refusing(func(slice *resourceapi.ResourceSlice) bool {
		return slices.ContainsFunc(slice.Spec.Devices, func(d resourceapi.Device) bool {
			for _, a := range d.Attributes {
				if a.StringValue != nil && a.StringValues != nil {
					return true
				}
			}
			return false
		})
	})
	for name, test := range map[string]struct {
		server func(*resourceapi.ResourceSlice) error
		want   features.Set
		most   int
	}{
		"drops lists": {dropLists, features.All().WithoutFeatures("DRAListTypeAttributes"), 1},
		"keeps lists": {keepLists, features.All(), 3},
	} {
		t.Run(name, func(t *testing.T) {
			requests := 0
			kept, err := features.DetectFeatures(t.Context(), pooltest.ChangingServer(t, func(slice *resourceapi.ResourceSlice) error {
				requests++
				return test.server(slice)
			}), "node")
			if err != nil || kept != test.want || requests != test.most {
				t.Errorf("%d requests, want %d; got %+v, want %+v; error %v", requests, test.most, kept, test.want, err)
			}
		})
	}
}

// If the server does not answer, refuses dry runs, or refuses every slice in a dry run,
// DetectFeatures returns no feature.
func TestNoAnswer(t *testing.T) {
	invalid := apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "", nil)
	for name, refusal := range map[string]error{
		"no roles yet":      apierrors.NewForbidden(schema.GroupResource{Resource: "resourceslices"}, "", errors.New("no roles yet")),
		"a webhook without": apierrors.NewBadRequest("admission webhook \"x\" does not support dry run"),
		"a policy":          invalid,
	} {
		kept, err := features.DetectFeatures(t.Context(), pooltest.ChangingServer(t, func(*resourceapi.ResourceSlice) error { return refusal }), "node")
		if !errors.Is(err, refusal) || kept != (features.Set{}) {
			t.Errorf("%s: got %+v, error %v", name, kept, err)
		}
	}
	timeout := errors.New("timeout")
	tests := map[string]func(*resourceapi.ResourceSlice) error{
		"never": func(*resourceapi.ResourceSlice) error { return timeout },
		"when it is asked for one field": func(slice *resourceapi.ResourceSlice) error {
			if len(slice.Spec.Devices) > 1 {
				return apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "", nil)
			}
			return timeout
		},
	}
	for name, server := range tests {
		t.Run(name, func(t *testing.T) {
			kept, err := features.DetectFeatures(t.Context(), pooltest.ChangingServer(t, server), "node")
			if !errors.Is(err, timeout) || kept != (features.Set{}) {
				t.Errorf("got %+v, error %v", kept, err)
			}
		})
	}
}
