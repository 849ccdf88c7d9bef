package driver

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger"
)

// healthInterval is how often the kubelet is told anew. It takes health that
// it has not heard of for 30 seconds as unknown, counting from when it heard of it
// (pkg/kubelet/cm/dra/healthinfo.go, updateHealthInfo, in 1.34 and 1.37). So what
// is told again must itself become Unknown when a device can no longer be read, as
// it does by [discovery.Watch].
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

// healthIn says how what a claim has is, as the view has it.
func (d *Driver) healthIn(v *view, r *ledger.Claim, has *ledger.Result) discovery.Health {
	device, found := v.Present.Device(has.Source)
	return d.HealthOf(&device.Device, found, v.snapshot.Gone, r, has)
}

// HealthOf says how what a claim has is: as its device if that is found, or gone,
// also where another has taken its place. That is not said while it may only look
// so: while the device is made what a claim wants, or cannot be read.
func (d *Driver) HealthOf(device *discovery.Device, found bool, gone discovery.Missing, r *ledger.Claim, has *ledger.Result) discovery.Health {
	now := time.Now()
	if !found {
		return gone.Health(has.Source, d.config.Gone())
	}
	health := d.jobs.said(device, now)
	if r.Configuring || device.Health.Status == discovery.Unknown || d.jobs.excuse(device.Name, now) > 0 {
		return health
	}
	if err := replacedBy(has, device, d.view.Load()); err != nil {
		health = discovery.Gone(d.config.Gone())
		health.Reason = err.Error()
	}
	return health
}

// healthReport says how the devices of the view are, and that those which are
// gone but held are not well. Who has a device only for administration keeps it
// longer than it is there, and others have what is in its place.
func (d *Driver) healthReport(v *view, now time.Time) kubeletplugin.DeviceHealthReport {
	health := make(map[string]discovery.Health)
	for _, device := range v.snapshot.Devices {
		health[device.Name] = d.jobs.said(&device.Device, now)
	}
	for _, r := range d.ledger.Claims() {
		for i := range r.Results {
			result := &r.Results[i]
			of := d.healthIn(v, r, result) // a numbered share is as its device
			_, said := health[result.Device]
			if !said || of.Key() == discovery.ConditionGone && !result.Admin {
				health[result.Device] = of
			}
		}
	}
	var report kubeletplugin.DeviceHealthReport
	for _, name := range slices.Sorted(maps.Keys(health)) {
		report.Devices = append(report.Devices, kubeletplugin.DeviceHealth{
			PoolName:   d.config.NodeName,
			DeviceName: name,
			Health:     statusOf(health[name]),
			Message:    health[name].Reason,
		})
	}
	return report
}

// statusOf returns what the kubelet is told. A condition that the administrator
// only wants to hear of leaves a device healthy, and is the report's message.
func statusOf(health discovery.Health) kubeletplugin.HealthStatus {
	switch {
	case health.Usable():
		return kubeletplugin.HealthStatusHealthy
	case health.Status == discovery.Unhealthy:
		return kubeletplugin.HealthStatusUnhealthy
	}
	return kubeletplugin.HealthStatusUnknown
}
