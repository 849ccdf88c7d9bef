package pool

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

const numaNode resourceapi.QualifiedName = "resource.kubernetes.io/numaNode"

func many(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("peer-%02d", i))
	}
	return names
}

func TestLists(t *testing.T) {
	device := func(attributes, capacities, peers int) rules.Offered {
		d := rules.Offered{Device: discovery.Device{Name: "a", Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{}}}
		d.SetNames("rdmaDevice", many(peers))
		d.Attributes.SetInt(numaNode, 1)
		d.Lists[numaNode] = resourceapi.DeviceAttribute{IntValues: []int64{1, 0}}
		for i := range attributes {
			d.Attributes.SetInt(resourceapi.QualifiedName(fmt.Sprint("a", i)), 1)
		}
		for i := range capacities {
			d.Capacity.Set(resourceapi.QualifiedName(fmt.Sprint("c", i)), 1)
		}
		return d
	}
	tests := map[string]struct {
		device  rules.Offered
		dropped []string
		linked  resourceapi.DeviceAttribute
		numa    resourceapi.DeviceAttribute
	}{
		"taken": {
			device: device(0, 0, 3),
			linked: resourceapi.DeviceAttribute{StringValues: many(3)}, numa: resourceapi.DeviceAttribute{IntValues: []int64{1, 0}},
		},
		"not taken": {
			device: device(0, 0, 3), dropped: []string{"DRAListTypeAttributes"},
			linked: resourceapi.DeviceAttribute{StringValue: new("peer-00,peer-01,peer-02")}, numa: resourceapi.DeviceAttribute{IntValue: new(int64(1))},
		},
		"longer than a string": {
			device: device(0, 0, 46),
			linked: resourceapi.DeviceAttribute{StringValues: many(46)}, numa: resourceapi.DeviceAttribute{IntValues: []int64{1, 0}},
		},
		"no room for all values": {
			device: device(0, 0, 48), // 49 with the NUMA node
			numa:   resourceapi.DeviceAttribute{IntValues: []int64{1, 0}},
		},
		"room for one list": {
			device: device(0, 0, 47),
			linked: resourceapi.DeviceAttribute{StringValues: many(47)}, numa: resourceapi.DeviceAttribute{IntValue: new(int64(1))},
		},
		"no room for another attribute": {
			device: device(28, 3, 20),
			numa:   resourceapi.DeviceAttribute{IntValues: []int64{1, 0}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			before := fmt.Sprint(test.device.Attributes)
			resources, problems := BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: []rules.Offered{test.device}}, Features: without(test.dropped...)})
			got := SlicesOf(resources)[0].Devices[0]
			if diff := cmp.Diff(test.linked, got.Attributes["rdmaDevice"]); diff != "" {
				t.Errorf("rdmaDevice (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.numa, got.Attributes[numaNode]); diff != "" {
				t.Errorf("numaNode (-want +got):\n%s", diff)
			}
			if len(problems) > 0 || fmt.Sprint(test.device.Attributes) != before {
				t.Errorf("problems %v; attributes of the snapshot %v", problems, test.device.Attributes)
			}
		})
	}
}

// Lists leave room for the partition type that the driver adds to devices that compete for
// counters.
func TestListsLeaveRoomForThePartitionType(t *testing.T) {
	for name, test := range map[string]struct{ attributes, peers, want int }{
		"of all values":     {0, resourceapi.ResourceSliceMaxAttributeValuesPerDevice, 1},
		"but one":           {0, resourceapi.ResourceSliceMaxAttributeValuesPerDevice - 1, resourceapi.ResourceSliceMaxAttributeValuesPerDevice},
		"of all attributes": {resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice - 1, 20, resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice},
	} {
		d := pooltest.PartDevice("g", "g-a", 1)
		d.Attributes = discovery.Attributes{}
		for i := range test.attributes {
			d.Attributes.SetInt(resourceapi.QualifiedName(fmt.Sprint("a", i)), 1)
		}
		d.Lists = discovery.Lists{"rdmaDevice": {StringValues: many(test.peers)}}
		resources, _ := BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: []rules.Offered{d}}, Features: features.All()})
		slice := SlicesOf(resources)[1]
		values := 0
		for _, attribute := range slice.Devices[0].Attributes {
			values += valuesOf(attribute)
		}
		if values != test.want || slice.PartitionTypeAttribute == nil {
			t.Errorf("%s: %d values, want %d, with the type %v", name, values, test.want, slice.PartitionTypeAttribute)
		}
	}
}

// A vanished device has no lists if the server no longer keeps lists.
func TestListsOfTheGone(t *testing.T) {
	in := Input{Node: "node", Snapshot: &rules.Snapshot{}, Claims: []*allocation.Claim{some("a", "a")}, Features: without("DRAListTypeAttributes")}
	in.Last = published([]resourceapi.Device{{Name: "a", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		numaNode: {IntValues: []int64{1, 0}}, "kind": {StringValue: new("gpu")},
	}}})
	resources, _ := BuildPools(in)
	want := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"kind": {StringValue: new("gpu")}}
	if diff := cmp.Diff(want, SlicesOf(resources)[0].Devices[0].Attributes); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The CEL function includes works for a single value and for a list.
func TestSelectorForBothForms(t *testing.T) {
	d := rules.Offered{Device: discovery.Device{Name: "a", Attributes: discovery.Attributes{}}}
	d.Attributes.SetInt(numaNode, 1)
	d.Lists = discovery.Lists{numaNode: {IntValues: []int64{1, 0}}}
	for _, kept := range []features.Set{features.All(), without("DRAListTypeAttributes")} {
		s := schedulerOf(t, &rules.Snapshot{Devices: []rules.Offered{d}}, kept)
		expression := `device.attributes["resource.kubernetes.io"].numaNode.includes(1)`
		selectors := []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
		if _, found := s.AllocateDevice("c", resourceapi.ExactDeviceRequest{Selectors: selectors}); !found {
			t.Errorf("%+v: not selected", kept)
		}
	}
}
