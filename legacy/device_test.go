package legacy

import (
	"time"

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

// host returns the host of a snapshot.
func host(s *rules.Snapshot) *discovery.Snapshot {
	return &discovery.Snapshot{Devices: found(s.Devices)}
}
