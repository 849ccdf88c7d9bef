package driver

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"chandler.dev/discovery"
)

// healthInterval is how often the kubelet is told anew. It takes health that
// it has not heard of for 30 seconds as unknown.
const healthInterval = 10 * time.Second

// WatchHealthStatus reports the health of all devices at once, when it changes,
// and again at an interval. It implements [kubeletplugin.DRAPlugin] and is not
// for other callers.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	ticker := time.NewTicker(d.healthInterval)
	defer ticker.Stop()
	for {
		v := d.view.Load()
		if v.snapshot != nil {
			select {
			case reports <- d.healthReport(v, time.Now()):
			case <-ctx.Done():
				return nil
			}
		}
		select {
		case <-v.next:
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// healthReport says how the devices of the view are, and that those which are
// gone but held are not well.
func (d *Driver) healthReport(v *view, now time.Time) kubeletplugin.DeviceHealthReport {
	health := make(map[string]discovery.Health)
	for name, reading := range v.health {
		reading.since = d.jobs.unknownSince(name, reading.since, now)
		health[name] = reading.settled(now, d.config.UnknownAfter)
	}
	for _, r := range d.recorded() {
		for _, result := range r.Results {
			of, found := health[result.Source]
			if !found {
				of = discovery.Health{Status: discovery.Unhealthy, Reason: "the device is gone"}
			}
			health[result.Device] = of // a numbered share is as its device
		}
	}
	var report kubeletplugin.DeviceHealthReport
	for _, name := range slices.Sorted(maps.Keys(health)) {
		report.Devices = append(report.Devices, kubeletplugin.DeviceHealth{
			PoolName:    d.config.NodeName,
			DeviceName:  name,
			Health:      statusOf(health[name].Status),
			LastUpdated: v.taken,
			Message:     health[name].Reason,
		})
	}
	return report
}

// recorded returns the records of this boot, none while they are not read.
func (d *Driver) recorded() []*record {
	select {
	case <-d.calls.ready:
		return d.store.prepared()
	default:
		return nil
	}
}

func statusOf(status discovery.HealthStatus) kubeletplugin.HealthStatus {
	switch status {
	case discovery.Healthy, "":
		return kubeletplugin.HealthStatusHealthy
	case discovery.Unhealthy:
		return kubeletplugin.HealthStatusUnhealthy
	}
	return kubeletplugin.HealthStatusUnknown
}
