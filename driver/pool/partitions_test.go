package pool

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
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

// profiled is a partition with a profile.
func profiled(silicon, name, profile string, takes int) rules.Offered {
	d := pooltest.PartDevice(silicon, name, takes)
	d.Attributes = discovery.Attributes{}
	d.Attributes.SetString("profile", profile)
	return d
}

// typesOf returns the published partition types by device, or nil if the slices declare no
// partition type attribute.
func typesOf(t *testing.T, snapshot *rules.Snapshot, kept features.Set) map[string]string {
	t.Helper()
	resources, _ := BuildPools(Input{Node: "node", Snapshot: snapshot, Features: kept})
	types := make(map[string]string)
	declared := false
	for _, slice := range SlicesOf(resources) {
		competing := slices.ContainsFunc(slice.Devices, consumesCounters)
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
	virtual := pooltest.PartDevice("g1", "g1-b", 2)
	virtual.Attributes = discovery.Attributes{}
	virtual.Attributes.SetString("function", "virtual")
	crowded := pooltest.PartDevice("g0", "g0-a", 1)
	crowded.Attributes = discovery.Attributes{}
	for i := range resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		crowded.Attributes.SetInt(resourceapi.QualifiedName(fmt.Sprint("a", i)), 1)
	}
	var many []rules.Offered
	for i := range 17 {
		name := fmt.Sprint("g", i)
		many = append(many, pooltest.PartDevice(name, name, 7), pooltest.PartDevice(name, name+"-a", 1))
	}
	tests := map[string]struct {
		devices []rules.Offered
		dropped []string
		want    map[string]string
	}{
		"nothing competes": {devices: []rules.Offered{{Device: discovery.Device{Name: "a"}}}},
		"by silicon and profile": {
			devices: []rules.Offered{
				pooltest.PartDevice("g0", "g0", 7), profiled("g0", "g0-a", "3g.20gb", 3), profiled("g0", "g0-b", "1g.5gb", 1), profiled("g0", "g0-c", "1g.5gb", 1),
				pooltest.PartDevice("g1", "g1-a", 1), virtual, {Device: discovery.Device{Name: "x"}},
			},
			want: map[string]string{
				"g0": "g0/whole", "g0-a": "g0/3g.20gb", "g0-b": "g0/1g.5gb", "g0-c": "g0/1g.5gb",
				"g1-a": "g1/part", "g1-b": "g1/virtual",
			},
		},
		"called alike, and not alike": {
			devices: []rules.Offered{profiled("g0", "g0-a", "half", 3), profiled("g0", "g0-b", "half", 4), profiled("g0", "g0-c", "half", 3)},
			want:    map[string]string{"g0-a": "g0/half-83f20e1e", "g0-b": "g0/half-7a5867fa", "g0-c": "g0/half-83f20e1e"},
		},
		"the server drops it":               {devices: []rules.Offered{pooltest.PartDevice("g0", "g0", 7)}, dropped: []string{"DRAPartitionableDevicesType"}},
		"the server drops counters":         {devices: []rules.Offered{pooltest.PartDevice("g0", "g0", 7)}, dropped: []string{"DRAPartitionableDevices"}},
		"more types than there may be":      {devices: many},
		"as many types as there may be":     {devices: many[:32], want: wholesAndParts(many[:32])},
		"no room for another attribute":     {devices: []rules.Offered{pooltest.PartDevice("g0", "g0", 7), crowded}},
		"no room for the silicon's name":    {devices: []rules.Offered{pooltest.PartDevice(strings.Repeat("g", 63), "a", 7)}},
		"an attribute of another's meaning": {devices: []rules.Offered{profiled("g0", "g0", "x", 7)}, want: map[string]string{"g0": "g0/whole"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test.devices = slices.Clone(test.devices)
			slices.SortFunc(test.devices, func(a, b rules.Offered) int { return strings.Compare(a.Name, b.Name) })
			got := typesOf(t, &rules.Snapshot{Devices: test.devices}, without(test.dropped...))
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func wholesAndParts(devices []rules.Offered) map[string]string {
	types := make(map[string]string)
	for _, d := range devices {
		types[d.Name] = d.PartOf.Name + "/part"
		if d.Name == d.PartOf.Name {
			types[d.Name] = d.Name + "/whole"
		}
	}
	return types
}

// On every host, devices of one type consume the same counters, and the status of a pool has room
// for all types.
func TestPartitionTypesOfRandomHosts(t *testing.T) {
	seen := 0
	for seed := range uint64(50) {
		snapshot := discoverytest.RandomHost(rand.New(rand.NewPCG(seed, 3)), 5+int(seed))
		costs := make(map[string]string)
		for name, value := range typesOf(t, snapshot, features.All()) {
			d, _ := snapshot.Lookup(name)
			cost := costOf([]resourceapi.DeviceCounterConsumption{{CounterSet: d.PartOf.Name, Counters: toCounters(d.Takes)}})
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

// schedulerOf returns a scheduler with the slices of a snapshot, for a server with the given
// features.
func schedulerOf(t *testing.T, snapshot *rules.Snapshot, kept features.Set) *pooltest.Scheduler {
	t.Helper()
	pool, problems := BuildPools(Input{Node: "node", Snapshot: snapshot, Features: kept})
	if len(problems) > 0 {
		t.Fatalf("problems: %v", problems)
	}
	return pooltest.NewScheduler(t, kept).Publish(pool)
}

// groupsOf returns the compatibility groups of all competing devices.
func groupsOf(pool resourceslice.DriverResources) map[string]string {
	groups := make(map[string]string)
	for _, slice := range SlicesOf(pool) {
		for _, device := range slice.Devices {
			for _, consumed := range device.ConsumesCounters {
				groups[device.Name] = strings.Join(consumed.CompatibilityGroups, " ")
			}
		}
	}
	return groups
}

func TestCompatibilityGroups(t *testing.T) {
	in := Input{Node: "node", Features: features.All(), Snapshot: &rules.Snapshot{Devices: []rules.Offered{
		pooltest.PartDevice("g0", "g0", 7), pooltest.PartDevice("g0", "g0-a", 3), pooltest.PartDevice("iommu-group-1", "g1", 7), {Device: discovery.Device{Name: "x"}},
	}}}
	in.Last, _ = BuildPools(in)
	want := map[string]string{"g0": "whole", "g0-a": "parts", "g1": "parts"}
	if diff := cmp.Diff(want, groupsOf(in.Last)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// A vanished, allocated device has the present groups of its physical device.
	in.Claims = []*allocation.Claim{some("g0-a", "g0-a")}
	in.Snapshot = &rules.Snapshot{Devices: []rules.Offered{pooltest.PartDevice("g0", "g0", 7)}}
	for _, in.Features = range []features.Set{features.All(), without("DRADeviceCompatibilityGroups"), without("DRAPartitionableDevicesType")} {
		in.Last, _ = BuildPools(in)
		want := map[string]string{"g0": "whole", "g0-a": "parts"}
		if !in.Features.Groups {
			want = map[string]string{"g0": "", "g0-a": ""}
		}
		if diff := cmp.Diff(want, groupsOf(in.Last)); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", in.Features, diff)
		}
		gone := devicesOf(in.Last)["g0-a"]
		if typed := gone.Attributes["partitionType"].StringValue != nil; typed != in.Features.PartitionType {
			t.Errorf("%+v: what is gone has a type: %v", in.Features, typed)
		}
	}
}

// A whole physical device is not allocated together with a partition, even if the counters allow
// both. Partitions are allocated together.
func TestCompatibilityGroupsExclude(t *testing.T) {
	devices := func() []rules.Offered {
		var out []rules.Offered
		for _, d := range []rules.Offered{pooltest.PartDevice("g0", "g0", 1), pooltest.PartDevice("g0", "g0-a", 1), pooltest.PartDevice("g0", "g0-b", 1)} {
			d.Attributes = discovery.Attributes{}
			d.Attributes.SetString("uuid", d.Name)
			out = append(out, d)
		}
		return out
	}
	get := func(s *pooltest.Scheduler, name string) bool {
		_, found := s.AllocateDevice(types.UID("claim-of-"+name), resourceapi.ExactDeviceRequest{Selectors: pooltest.ByUUID(name)})
		return found
	}
	for _, kept := range []features.Set{features.All(), without("DRADeviceCompatibilityGroups")} {
		s := schedulerOf(t, &rules.Snapshot{Devices: devices()}, kept)
		if !get(s, "g0-a") || !get(s, "g0-b") {
			t.Errorf("%+v: parts exclude each other", kept)
		}
		if got := get(s, "g0"); got == kept.Groups {
			t.Errorf("%+v: the whole beside its parts: %v", kept, got)
		}
	}
	s := schedulerOf(t, &rules.Snapshot{Devices: devices()}, features.All())
	if !get(s, "g0") || get(s, "g0-a") {
		t.Error("a part beside the whole")
	}
}
