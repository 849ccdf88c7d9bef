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
	"chandler.dev/internal/ledger"
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
func ofDevice(device, name string) *ledger.Claim {
	return &ledger.Claim{Namespace: "default", Name: "c", Results: []ledger.Result{{Device: name, Source: device, Silicon: device, Whole: true}}}
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
			in := Input{Snapshot: &rules.Snapshot{Devices: channels(3)}, Features: features.All(), GoneEffect: resourceapi.DeviceTaintEffectNoSchedule}
			test.change(&in)
			made, _ := BuildPool(in)
			if got := namesIn(made); got != test.names {
				t.Errorf("the pool has %q, want %q", got, test.names)
			}
			d := contentOf(made).devices["channels"]
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

var unhealthy = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionUnhealthy}

// The scheduler allocates each of the interchangeable devices once, and one for a request without an
// amount.
func TestSchedulerAllocatesInterchangeable(t *testing.T) {
	made, _ := BuildPool(Input{Snapshot: &rules.Snapshot{Devices: channels(3)}, Features: features.All()})
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
