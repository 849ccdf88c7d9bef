package pool

import (
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

// channels returns n interchangeable devices.
func channels(n int) (devices []rules.Offered) {
	for i := range n {
		d := rules.Offered{Device: discovery.Device{Name: fmt.Sprint("channel-", i), Interchangeable: "channels", Attributes: discovery.Attributes{}}}
		d.Attributes.SetInt("channel", int64(i))
		d.Attributes.SetString("model", "channel")
		devices = append(devices, d)
	}
	return devices
}

// ofDevice returns the claim of a device that was allocated by a name.
func ofDevice(device, name string) *allocation.Claim {
	return &allocation.Claim{Namespace: "default", Name: "c", Results: []allocation.Result{{Pool: "node/other", Device: name, Source: device, Silicon: device, Whole: true}}}
}

// Interchangeable devices are published as one device with a capacity, unless the server or the
// administrator distinguishes them. The capacity is the number of devices that are allocated by the
// common name, whatever has become of them, and of those that can be.
func TestInterchangeable(t *testing.T) {
	shared := func(d *rules.Offered) { d.Capacity, d.Sharing = byNumber("", 2).Capacity, byNumber("", 2).Sharing }
	for name, test := range map[string]struct {
		change   func(in *Input)
		names    string
		capacity int64
	}{
		"all":                     {func(*Input) {}, "channels", 3},
		"without sharing":         {func(in *Input) { in.Features = without("DRAConsumableCapacity") }, "channel-0 channel-1 channel-2", 0},
		"with a listed attribute": {func(in *Input) { in.Snapshot.Attributes = []resourceapi.QualifiedName{"channel"} }, "channel-0 channel-1 channel-2", 0},
		"with an equal attribute": {func(in *Input) { in.Snapshot.Attributes = []resourceapi.QualifiedName{"model"} }, "channels", 3},
		"one, with a listed attribute": {func(in *Input) {
			in.Snapshot.Devices, in.Snapshot.Attributes = in.Snapshot.Devices[:1], []resourceapi.QualifiedName{"channel"}
		}, "channel-0", 0},
		"with different overhead": {func(in *Input) { in.Snapshot.Devices[1].Overhead = rules.HostResources{"cpu": {}} }, "channel-0 channel-1 channel-2", 0},
		"one is shared":           {func(in *Input) { shared(&in.Snapshot.Devices[1]) }, "channel-0 channel-1 channel-2", 0},
		"allocated":               {func(in *Input) { in.Claims = append(in.Claims, ofDevice("channel-0", "channels")) }, "channels", 3},
		"allocated, then withheld": {func(in *Input) {
			in.Claims, in.Withheld = append(in.Claims, ofDevice("channel-0", "channels")), map[string]string{"channel-0": "moves"}
		}, "channels", 3},
		"allocated, then gone": {func(in *Input) {
			in.Claims, in.Snapshot.Devices = append(in.Claims, ofDevice("channel-0", "channels")), in.Snapshot.Devices[1:]
		}, "channels", 3},
		"allocated, then unhealthy": {func(in *Input) {
			in.Claims, in.Snapshot.Devices[0].Health = append(in.Claims, ofDevice("channel-0", "channels")), unhealthy
		}, "channels", 3},
		"allocated by its own name": {func(in *Input) { in.Claims = append(in.Claims, ofDevice("channel-0", "channel-0")) }, "channels", 2},
		"allocated by the common name, then without sharing": {func(in *Input) {
			in.Claims, in.Features = append(in.Claims, ofDevice("channel-0", "channels")), without("DRAConsumableCapacity")
		}, "channel-1 channel-2", 0},
		"withheld":      {func(in *Input) { in.Withheld = map[string]string{"channel-0": "moves"} }, "channels", 2},
		"unhealthy":     {func(in *Input) { in.Snapshot.Devices[0].Health = unhealthy }, "channels", 2},
		"none":          {func(in *Input) { in.Withheld = map[string]string{"channel-0": "x", "channel-1": "x", "channel-2": "x"} }, "", 0},
		"without taint": {func(in *Input) { in.Snapshot.Devices[0].Health, in.Features = unhealthy, without("DRADeviceTaints") }, "channels", 2},
	} {
		t.Run(name, func(t *testing.T) {
			in := Input{Node: "node", Snapshot: &rules.Snapshot{Devices: channels(3)}, Features: features.All(), GoneEffect: resourceapi.DeviceTaintEffectNoSchedule}
			test.change(&in)
			made, _ := BuildPools(in)
			if got := namesIn(made); got != test.names {
				t.Errorf("the pool has %q, want %q", got, test.names)
			}
			d := devicesOf(made)["channels"]
			shares := d.Capacity[discovery.Shares].Value
			if shares.Value() != test.capacity {
				t.Errorf("the capacity is %s, want %d", shares.String(), test.capacity)
			}
			if _, distinct := d.Attributes["channel"]; distinct || len(d.Taints) > 0 {
				t.Errorf("the device has a channel or a taint: %v", d)
			}
		})
	}
}

// functions returns n virtual functions of an adapter, which are interchangeable.
func functions(n int) (devices []rules.Offered) {
	for i := range n {
		d := rules.Offered{Device: discovery.Device{Name: fmt.Sprint("function-", i), Interchangeable: "adapter-vfs", PartOf: &discovery.Silicon{Name: "adapter"}, Attributes: discovery.Attributes{}}}
		d.Attributes.SetString("model", "X710")
		d.Attributes.SetString("ifName", fmt.Sprintf("ens1v%d", i))
		d.Attributes.SetInt("vfIndex", int64(i))
		d.Attributes.SetInt("iommuGroup", int64(40+i))
		d.Lists = discovery.Lists{"rdmaDevice": {StringValues: []string{fmt.Sprint("mlx5_", i), "other"}}}
		devices = append(devices, d)
	}
	return devices
}

// The virtual functions of an adapter are published as one device without the attributes that
// distinguish them, unless claims may need to distinguish them.
func TestInterchangeableFunctions(t *testing.T) {
	const joined, each = "adapter-vfs", "function-0 function-1 function-2"
	for name, test := range map[string]struct {
		change   func(in *Input, second *rules.Offered)
		names    string
		capacity int64
	}{
		"all":                   {func(*Input, *rules.Offered) {}, joined, 3},
		"with the listed index": {func(in *Input, _ *rules.Offered) { in.Snapshot.Attributes = []resourceapi.QualifiedName{"vfIndex"} }, each, 0},
		"with a listed attribute of other devices": {func(in *Input, _ *rules.Offered) {
			in.Snapshot.Attributes = []resourceapi.QualifiedName{"channel"}
		}, joined, 3},
		"with the listed interface, all in pods": {func(in *Input, _ *rules.Offered) {
			in.Snapshot.Attributes = []resourceapi.QualifiedName{"ifName"}
			for i := range in.Snapshot.Devices {
				d := &in.Snapshot.Devices[i]
				delete(d.Attributes, "ifName")
				d.Attributes.SetString("resource.kubernetes.io/pciBusID", fmt.Sprintf("0000:41:00.%d", i))
			}
		}, each, 0},
		"with another model":            {func(_ *Input, d *rules.Offered) { d.Attributes.SetString("model", "X722") }, each, 0},
		"with a further attribute":      {func(_ *Input, d *rules.Offered) { d.Attributes.SetString("pKey", "0x8001") }, each, 0},
		"with an unpublished attribute": {func(_ *Input, d *rules.Offered) { d.Attributes.SetInt("acpiIndex", 3) }, joined, 3},
		"an interface is in a pod":      {func(_ *Input, d *rules.Offered) { delete(d.Attributes, "ifName") }, joined, 3},
		"one cannot be read": {func(_ *Input, d *rules.Offered) {
			delete(d.Attributes, "model")
			d.Health = discovery.Health{Status: discovery.Unknown}
		}, joined, 2},
		"one may go to vfio": {func(_ *Input, d *rules.Offered) { d.Passthrough = &discovery.PassthroughOption{} }, each, 0},
		"one has a name for Multus": {func(_ *Input, d *rules.Offered) {
			d.Offers = []discovery.Offer{{Resource: "example.com/net", NameAs: "k8s.cni.cncf.io/resourceName"}}
		}, each, 0},
		"one has another name":    {func(_ *Input, d *rules.Offered) { d.Offers = []discovery.Offer{{Resource: "example.com/net"}} }, joined, 3},
		"the adapter is withheld": {func(in *Input, _ *rules.Offered) { in.Withheld = map[string]string{"adapter": "moves"} }, "", 0},
		"the adapter is withheld, one is allocated": {func(in *Input, _ *rules.Offered) {
			in.Withheld, in.Claims = map[string]string{"adapter": "moves"}, []*allocation.Claim{ofFunction("adapter-vfs")}
		}, "", 0},
		"one is allocated by its own name": {func(in *Input, _ *rules.Offered) { in.Claims = []*allocation.Claim{ofFunction("function-1")} }, joined, 2},
		"one is allocated, then they are published one by one": {func(in *Input, _ *rules.Offered) {
			in.Claims, in.Snapshot.Attributes = []*allocation.Claim{ofFunction("adapter-vfs")}, []resourceapi.QualifiedName{"vfIndex"}
		}, "function-0 function-2", 0},
		"one is allocated, then they are gone": {func(in *Input, _ *rules.Offered) {
			in.Claims = []*allocation.Claim{ofFunction("adapter-vfs")}
			in.Snapshot.Devices = []rules.Offered{{Device: discovery.Device{Name: "adapter"}}}
		}, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			in := Input{Node: "node", Snapshot: &rules.Snapshot{Devices: functions(3)}, Features: features.All(), GoneEffect: resourceapi.DeviceTaintEffectNoSchedule}
			test.change(&in, &in.Snapshot.Devices[1])
			made, _ := BuildPools(in)
			if got := namesIn(made); got != test.names {
				t.Errorf("the pool has %q, want %q", got, test.names)
			}
			d := devicesOf(made)[joined]
			shares := d.Capacity[discovery.Shares].Value
			if shares.Value() != test.capacity {
				t.Errorf("the capacity is %s, want %d", shares.String(), test.capacity)
			}
			if len(d.Attributes) > 1 || test.capacity > 0 && d.Attributes["model"].StringValue == nil {
				t.Errorf("the device has the attributes %v", d.Attributes)
			}
		})
	}
}

// ofFunction returns the claim of the second function, which was allocated by a name.
func ofFunction(name string) *allocation.Claim {
	return &allocation.Claim{Namespace: "default", Name: "c", Results: []allocation.Result{{Pool: "node/other", Device: name, Source: "function-1", Silicon: "adapter"}}}
}

var unhealthy = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionUnhealthy}

// The scheduler allocates each of the interchangeable devices once, and one for a request without an
// amount.
func TestSchedulerAllocatesInterchangeable(t *testing.T) {
	made, _ := BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: channels(3)}, Features: features.All()})
	s := pooltest.NewScheduler(t, features.All()).Publish(made)
	several := func(n int64) resourceapi.ExactDeviceRequest {
		amount := map[resourceapi.QualifiedName]resource.Quantity{discovery.Shares: *resource.NewQuantity(n, resource.DecimalSI)}
		return resourceapi.ExactDeviceRequest{Capacity: &resourceapi.CapacityRequirements{Requests: amount}}
	}
	if _, allocated := s.AllocateDevice("four", several(4)); allocated {
		t.Error("four of three devices are allocated")
	}
	if _, allocated := s.AllocateDevice("two", several(2)); !allocated {
		t.Error("two devices cannot be allocated")
	}
	if _, allocated := s.AllocateDevice("third", resourceapi.ExactDeviceRequest{}); !allocated {
		t.Error("the third device cannot be allocated")
	}
	if _, allocated := s.AllocateDevice("fourth", resourceapi.ExactDeviceRequest{}); allocated {
		t.Error("more devices are allocated than there are")
	}
}
