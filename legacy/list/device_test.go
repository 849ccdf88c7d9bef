package list

import (
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

const gpuResource = "example.com/gpu"

// testTime is some time.
var testTime = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// gpu returns a device "gpu-<id>" with a node of its own, offered by its ID.
func gpu(id string) rules.Offered {
	return rules.Offered{Device: discovery.Device{Name: "gpu-" + id, Family: "gpu", Attributes: discovery.Attributes{}, CommonNodes: []string{"/dev/gpuctl"}, Edits: specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/gpuctl", HostPath: "/dev/gpuctl", Permissions: "r"},
			{Path: "/dev/" + id, HostPath: "/dev/" + id, Permissions: "rw"},
		},
		Env: []string{"GPU_LIBRARY=/usr/lib/gpu"},
	}}, Offers: []discovery.Offer{{Resource: gpuResource, IDs: []string{id}}}}
}

// offer makes the device stand behind other IDs.
func offer(d rules.Offered, unit string, ids ...string) rules.Offered {
	d.Offers = []discovery.Offer{{Resource: gpuResource, IDs: ids, Unit: unit}}
	return d
}

// at puts the device on a NUMA node, PCIe root and fabric; -1 and "" are not
// known.
func at(d rules.Offered, numa int64, root, fabric string) rules.Offered {
	d.Attributes = discovery.Attributes{}
	if numa >= 0 {
		d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{IntValue: &numa}
	}
	d.Attributes.SetString(deviceattribute.StandardDeviceAttributePCIeRoot, root)
	d.Attributes.SetString("fabric", fabric)
	return d
}

func sick(d rules.Offered, status discovery.HealthStatus, reason string) rules.Offered {
	d.Health = discovery.Health{Status: status, Reason: reason}
	return d
}

func snapshot(devices ...rules.Offered) *rules.Snapshot {
	return &rules.Snapshot{Devices: devices}
}

// found returns the devices as their families gave them, with the same offers.
func found(devices []rules.Offered) []discovery.Device {
	out := rules.Devices(devices)
	for i := range out {
		out[i].Classic = devices[i].Offers
	}
	return out
}
