// Package listtest provides devices with device plugin IDs for tests of the device plugin API.
package listtest

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// The resources of the devices.
const (
	Resource       = "example.com/gpu"
	OtherResource  = "example.com/other"
	MemoryResource = "aliyun.com/gpu-mem"
)

// Time is an arbitrary time.
var Time = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// GPU returns a device "gpu-<id>" with a device node of its own, offered by its ID.
func GPU(id string) rules.Offered {
	return rules.Offered{Device: discovery.Device{Name: "gpu-" + id, Family: "gpu", Attributes: discovery.Attributes{}, CommonNodes: []string{"/dev/gpuctl"}, Edits: specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/gpuctl", HostPath: "/dev/gpuctl", Permissions: "r"},
			{Path: "/dev/" + id, HostPath: "/dev/" + id, Permissions: "rw"},
		},
		Env: []string{"GPU_LIBRARY=/usr/lib/gpu"},
	}}, Offers: []discovery.Offer{{Resource: Resource, IDs: []string{id}}}}
}

// WithHealth returns the device with another health.
func WithHealth(d rules.Offered, status discovery.HealthStatus, reason string) rules.Offered {
	d.Health = discovery.Health{Status: status, Reason: reason}
	return d
}

// Snapshot returns a snapshot of devices.
func Snapshot(devices ...rules.Offered) *rules.Snapshot { return &rules.Snapshot{Devices: devices} }

// FoundDevices returns the devices as their families describe them, with the same offers.
func FoundDevices(devices []rules.Offered) []discovery.Device {
	found := rules.PlainDevices(devices)
	for i := range found {
		found[i].PluginOffers = devices[i].Offers
	}
	return found
}

// InUnits returns a device that is shared in n units of memory.
func InUnits(id string, n int) rules.Offered {
	d := GPU(id)
	d.Offers = []discovery.Offer{{Resource: MemoryResource, Counts: "memory", IDs: UnitIDs(id, 0, n)}}
	d.Sharing = &rules.Sharing{Capacity: "memory", Unit: resource.MustParse("1Gi")}
	return d
}

// UnitIDs returns the IDs of units of a device.
func UnitIDs(id string, from, to int) (ids []string) {
	for i := from; i < to; i++ {
		ids = append(ids, fmt.Sprintf("%s-_-%d", id, i))
	}
	return ids
}

// Parts returns partitions of a physical device, each with an ID and its share of the counter. Each
// is a unit. Partitions whose ID begins with "x" have another resource.
func Parts(silicon string, all int64, takes map[string]int64) (devices []rules.Offered) {
	counters := map[string]resource.Quantity{"cores": *resource.NewQuantity(all, resource.DecimalSI)}
	for _, id := range slices.Sorted(maps.Keys(takes)) {
		d := GPU(id)
		d.PartOf = &discovery.Silicon{Name: silicon, Counters: counters}
		d.Takes = map[string]resource.Quantity{"cores": *resource.NewQuantity(takes[id], resource.DecimalSI)}
		if strings.HasPrefix(id, "x") {
			d.Offers[0].Resource = OtherResource
		}
		devices = append(devices, d)
	}
	return devices
}
