package legacy

import (
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

const gpuResource = "example.com/gpu"

// testTime is some time.
var testTime = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// gpu returns a device "gpu-<id>" with a node of its own, offered by its ID.
func gpu(id string) discovery.Device {
	return discovery.Device{
		Name:       "gpu-" + id,
		Family:     "gpu",
		Attributes: discovery.Attributes{},
		Edits: specs.ContainerEdits{
			DeviceNodes: []*specs.DeviceNode{
				{Path: "/dev/gpuctl", HostPath: "/dev/gpuctl", Permissions: "r"},
				{Path: "/dev/" + id, HostPath: "/dev/" + id, Permissions: "rw"},
			},
			Env: []string{"GPU_LIBRARY=/usr/lib/gpu"},
		},
		Offers: []discovery.Offer{{Resource: gpuResource, IDs: []string{id}}},
	}
}

func sick(d discovery.Device, status discovery.HealthStatus, reason string) discovery.Device {
	d.Health = discovery.Health{Status: status, Reason: reason}
	return d
}

func snapshot(devices ...discovery.Device) *discovery.Snapshot {
	return &discovery.Snapshot{Devices: devices}
}
