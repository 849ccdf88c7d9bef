package driver

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
)

// profiled is a part with a profile.
func profiled(silicon, name, profile string, takes int) discovery.Device {
	d := part(silicon, name, takes)
	d.Attributes = discovery.Attributes{}
	d.Attributes.SetString("profile", profile)
	return d
}

// typesOf returns the partition types that are published, by device, nil if the
// slices name no such attribute.
func typesOf(t *testing.T, snapshot *discovery.Snapshot, without Without) map[string]string {
	t.Helper()
	resources, _ := Slices("node", snapshot, without)
	types := make(map[string]string)
	declared := false
	for _, slice := range resources.Pools["node"].Slices {
		competing := slices.ContainsFunc(slice.Devices, consumes)
		switch name := slice.PartitionTypeAttribute; {
		case name != nil && (*name != "chandler.dev/partitionType" || !competing):
			t.Errorf("a slice has the types %s, with devices that compete: %v", *name, competing)
		case name != nil:
			declared = true
		case declared && competing:
			t.Error("some slices have types, and others have not")
		}
		for _, device := range slice.Devices {
			if value := device.Attributes["partitionType"].StringValue; value != nil {
				types[device.Name] = *value
			}
		}
	}
	if declared != (len(types) > 0) {
		t.Errorf("slices have types: %v; devices: %v", declared, types)
	}
	if !declared {
		return nil
	}
	return types
}

func TestPartitionTypes(t *testing.T) {
	virtual := part("g1", "g1-b", 2)
	virtual.Attributes = discovery.Attributes{}
	virtual.Attributes.SetString("function", "virtual")
	crowded := part("g0", "g0-a", 1)
	crowded.Attributes = discovery.Attributes{}
	for i := range resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		crowded.Attributes.SetInt(resourceapi.QualifiedName(fmt.Sprint("a", i)), 1)
	}
	var many []discovery.Device
	for i := range 17 {
		name := fmt.Sprint("g", i)
		many = append(many, part(name, name, 7), part(name, name+"-a", 1))
	}
	tests := map[string]struct {
		devices []discovery.Device
		without Without
		want    map[string]string
	}{
		"nothing competes": {devices: []discovery.Device{{Name: "a"}}},
		"by silicon and profile": {
			devices: []discovery.Device{
				part("g0", "g0", 7), profiled("g0", "g0-a", "3g.20gb", 3), profiled("g0", "g0-b", "1g.5gb", 1), profiled("g0", "g0-c", "1g.5gb", 1),
				part("g1", "g1-a", 1), virtual, {Name: "x"},
			},
			want: map[string]string{
				"g0": "g0/whole", "g0-a": "g0/3g.20gb", "g0-b": "g0/1g.5gb", "g0-c": "g0/1g.5gb",
				"g1-a": "g1/part", "g1-b": "g1/virtual",
			},
		},
		"called alike, and not alike": {
			devices: []discovery.Device{profiled("g0", "g0-a", "half", 3), profiled("g0", "g0-b", "half", 4), profiled("g0", "g0-c", "half", 3)},
			want:    map[string]string{"g0-a": "g0/half-83f20e1e", "g0-b": "g0/half-7a5867fa", "g0-c": "g0/half-83f20e1e"},
		},
		"the server drops it":               {devices: []discovery.Device{part("g0", "g0", 7)}, without: Without{PartitionType: true}},
		"the server drops counters":         {devices: []discovery.Device{part("g0", "g0", 7)}, without: Without{Counters: true}},
		"more types than there may be":      {devices: many},
		"as many types as there may be":     {devices: many[:32], want: wholesAndParts(many[:32])},
		"no room for another attribute":     {devices: []discovery.Device{part("g0", "g0", 7), crowded}},
		"no room for the silicon's name":    {devices: []discovery.Device{part(strings.Repeat("g", 63), "a", 7)}},
		"an attribute of another's meaning": {devices: []discovery.Device{profiled("g0", "g0", "x", 7)}, want: map[string]string{"g0": "g0/whole"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test.devices = slices.Clone(test.devices)
			slices.SortFunc(test.devices, func(a, b discovery.Device) int { return strings.Compare(a.Name, b.Name) })
			got := typesOf(t, &discovery.Snapshot{Devices: test.devices}, test.without)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func wholesAndParts(devices []discovery.Device) map[string]string {
	types := make(map[string]string)
	for _, d := range devices {
		types[d.Name] = d.PartOf.Name + "/part"
		if d.Name == d.PartOf.Name {
			types[d.Name] = d.Name + "/whole"
		}
	}
	return types
}

// Whatever the host: devices of one type take the same, and there are no more
// types than the status of a pool has room for.
func TestPartitionTypesOfRandomHosts(t *testing.T) {
	seen := 0
	for seed := range uint64(50) {
		snapshot := discoverytest.RandomHost(rand.New(rand.NewPCG(seed, 2)), 5+int(seed))
		costs := make(map[string]string)
		for name, value := range typesOf(t, snapshot, Without{}) {
			d, _ := snapshot.Lookup(name)
			cost := costOf([]resourceapi.DeviceCounterConsumption{{CounterSet: d.PartOf.Name, Counters: counters(d.Takes)}})
			if other, found := costs[value]; found && other != cost {
				t.Errorf("%s: %s and %s", value, cost, other)
			}
			costs[value] = cost
		}
		seen = max(seen, len(costs))
		if len(costs) > 32 {
			t.Errorf("%d types: %v", len(costs), slices.Sorted(maps.Keys(costs)))
		}
	}
	if seen < 10 {
		t.Errorf("no host had more than %d types", seen)
	}
}

// groupsOf returns the compatibility groups of all devices that compete.
func groupsOf(o *offer) map[string]string {
	resources, _ := o.driverResources()
	groups := make(map[string]string)
	for _, slice := range resources.Pools["node"].Slices {
		for _, device := range slice.Devices {
			for _, consumed := range device.ConsumesCounters {
				groups[device.Name] = strings.Join(consumed.CompatibilityGroups, " ")
			}
		}
	}
	return groups
}

func TestCompatibilityGroups(t *testing.T) {
	o := &offer{pool: "node", snapshot: &discovery.Snapshot{Devices: []discovery.Device{
		part("g0", "g0", 7), part("g0", "g0-a", 3), part("iommu-group-1", "g1", 7), {Name: "x"},
	}}}
	resources, _ := o.driverResources()
	o.last = remember(resources)
	o.held = map[string]string{"g0-a": "g0-a"}
	want := map[string]string{"g0": "whole", "g0-a": "parts", "g1": "parts"}
	if diff := cmp.Diff(want, groupsOf(o)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// What is gone and held has the groups that its silicon has now.
	o.snapshot = &discovery.Snapshot{Devices: []discovery.Device{part("g0", "g0", 7)}}
	for _, without := range []Without{{}, {Groups: true}, {PartitionType: true}} {
		o.without = without
		want := map[string]string{"g0": "whole", "g0-a": "parts"}
		if without.Groups {
			want = map[string]string{"g0": "", "g0-a": ""}
		}
		if diff := cmp.Diff(want, groupsOf(o)); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", without, diff)
		}
		resources, _ := o.driverResources()
		published := remember(resources)
		if typed := published.devices["g0-a"].Attributes["partitionType"].StringValue != nil; typed == without.PartitionType {
			t.Errorf("%+v: what is gone has a type: %v", without, typed)
		}
		o.last = published
	}
}

// What is all of its silicon and what is part of it are not given out together,
// even where the counters would allow it. Parts are.
func TestCompatibilityGroupsExclude(t *testing.T) {
	devices := func() []discovery.Device {
		var out []discovery.Device
		for _, d := range []discovery.Device{part("g0", "g0", 1), part("g0", "g0-a", 1), part("g0", "g0-b", 1)} {
			d.Attributes = discovery.Attributes{}
			d.Attributes.SetString("serial", d.Name)
			out = append(out, d)
		}
		return out
	}
	get := func(s *scheduler, name string) bool {
		_, found := s.allocate(types.UID("claim-of-"+name), resourceapi.ExactDeviceRequest{Selectors: bySerial(name)})
		return found
	}
	for _, without := range []Without{{}, {Groups: true}} {
		s := schedulerOf(t, &discovery.Snapshot{Devices: devices()}, without)
		if !get(s, "g0-a") || !get(s, "g0-b") {
			t.Errorf("%+v: parts exclude each other", without)
		}
		if got := get(s, "g0"); got != without.Groups {
			t.Errorf("%+v: the whole beside its parts: %v", without, got)
		}
	}
	s := schedulerOf(t, &discovery.Snapshot{Devices: devices()}, Without{})
	if !get(s, "g0") || get(s, "g0-a") {
		t.Error("a part beside the whole")
	}
}
