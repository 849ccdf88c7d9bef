package agent

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// Slices and claims name devices, partitions of physical devices, or numbered shares. A physical
// device does not leave DRA while any of these names exists, even if the configuration has stopped
// sharing the device in the meantime.
func TestPublished(t *testing.T) {
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "slice"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: discovery.Domain, NodeName: new("node"),
			Devices: []resourceapi.Device{{Name: "gpu-share-03"}, {Name: "npu-core-1"}},
		},
	}
	claim := func(name, pool string, results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
		for i := range results {
			results[i].Driver, results[i].Pool = discovery.Domain, pool
		}
		if len(results) > 0 {
			c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
		}
		return c
	}
	client := fake.NewClientset(slice,
		claim("shares", "node", resourceapi.DeviceRequestAllocationResult{Device: "fpga-share-00"}),
		claim("elsewhere", "other", resourceapi.DeviceRequestAllocationResult{Device: "nic"}),
		claim("monitor", "node", resourceapi.DeviceRequestAllocationResult{Device: "nic", AdminAccess: new(true)}),
		claim("waits", "node"),
	)
	npu := &discovery.Silicon{Name: "npu"}
	s := &rules.Snapshot{Devices: []rules.Offered{{Device: discovery.Device{Name: "fpga"}}, {Device: discovery.Device{Name: "gpu"}}, {Device: discovery.Device{Name: "nic"}}, {Device: discovery.Device{Name: "npu-core-1", PartOf: npu}}}}
	said := (&placer{cluster: cluster.NewNode("node", client, "", nil)}).publishedDevices(t.Context(), s)
	want := map[string]string{"gpu": "ResourceSlice slice", "npu": "ResourceSlice slice", "fpga": "ResourceClaim default/shares"}
	if said.Err != nil || len(said.BySilicon) != len(want) {
		t.Errorf("got %v, %v; want %v", said.BySilicon, said.Err, want)
	}
	for silicon, who := range want {
		if said.BySilicon[silicon] != who {
			t.Errorf("%s is named by %q, want %q", silicon, said.BySilicon[silicon], who)
		}
	}
	for _, silicon := range []string{"gpu", "fpga"} {
		p := PlaceDevices(map[string]discovery.Mode{silicon: dra}, []rules.Offered{{Device: discovery.Device{Name: silicon}, Mode: classic}}, viewOf(nil, nil), Facts{Published: said})
		if p.API[silicon] != dra || p.Moving[silicon] == "" {
			t.Errorf("%s leaves DRA: %+v", silicon, p)
		}
	}
}
