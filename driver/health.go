package driver

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"chandler.dev/discovery"
	"chandler.dev/driver/claimstatus"
	"chandler.dev/internal/ledger/allocation"
)

// healthInterval is the interval of repeated health reports. The kubelet treats health as unknown
// 30 seconds after receiving it (pkg/kubelet/cm/dra/healthinfo.go, updateHealthInfo, in 1.34 and
// 1.37). Since the driver repeats reports, the health itself must become Unknown when a device can
// no longer be read. [scan.Watch] does this.
const healthInterval = 10 * time.Second

// statusQuiet is the time without a Prepare before the status of prepared claims is written.
const statusQuiet = time.Second

// WatchHealthStatus reports the health of all devices at once, on changes, and at an interval. It
// implements [kubeletplugin.DRAPlugin] and is not for other callers.
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

// healthIn returns a function that returns the health of a claim's device in the view.
func (d *Driver) healthIn(v *view) claimstatus.HealthFunc {
	return func(r *allocation.Claim, has *allocation.Result) discovery.Health {
		device, found := v.Present.Device(has.Source)
		return d.HealthOf(&device.Device, found, v.snapshot.Gone, r, has)
	}
}

// HealthOf returns the health of a claim's device. A device that was not found, or was replaced by
// another, is gone. A replacement is not reported while it is uncertain, because the device is
// being configured or cannot be read.
func (d *Driver) HealthOf(device *discovery.Device, found bool, gone discovery.Missing, r *allocation.Claim, has *allocation.Result) discovery.Health {
	now := time.Now()
	if !found {
		return gone.HealthOf(has.Source, d.config.GoneEffect())
	}
	health := d.claims.jobs.reportedHealth(device, now)
	if r.Configuring || device.Health.Status == discovery.Unknown || d.claims.jobs.excuseFor(device.Name, now) > 0 {
		return health
	}
	if err := replacedBy(has, device, d.view.Load()); err != nil {
		health = discovery.GoneHealth(d.config.GoneEffect())
		health.Reason = err.Error()
	}
	return health
}

// healthReport returns the health of all devices of the view, in the pools that publish them and in
// those that claims name. Allocated devices that are gone are unhealthy. A claim with
// admin access may keep a device that has vanished, and does not affect the health of its replacement.
func (d *Driver) healthReport(v *view, now time.Time) kubeletplugin.DeviceHealthReport {
	type key struct{ pool, device string }
	health, published, healthOf := make(map[key]discovery.Health), d.Publisher.PoolsByDevice(), d.healthIn(v)
	for _, device := range v.snapshot.Devices {
		pool := cmp.Or(published[device.Name], discovery.PoolName(d.config.NodeName, device.InMainPool()))
		health[key{pool, device.Name}] = d.claims.jobs.reportedHealth(&device.Device, now)
	}
	for _, r := range d.ledger.Claims() {
		for i := range r.Results {
			result := &r.Results[i]
			of := healthOf(r, result) // a numbered share has the health of its device
			device := key{result.Pool, result.Device}
			_, said := health[device]
			// Interchangeable devices have one health, since the kubelet's key has no share ID. The
			// status of each claim has the health of its own device.
			if !said || result.IsChosen() && of.IsUsable() || !result.IsChosen() && of.Key() == discovery.ConditionGone && !result.Admin {
				health[device] = of
			}
		}
	}
	var report kubeletplugin.DeviceHealthReport
	for device, h := range health {
		report.Devices = append(report.Devices, kubeletplugin.DeviceHealth{
			PoolName:   device.pool,
			DeviceName: device.device,
			Health:     statusOf(h),
			Message:    h.Reason,
		})
	}
	slices.SortFunc(report.Devices, func(a, b kubeletplugin.DeviceHealth) int {
		return cmp.Or(strings.Compare(a.DeviceName, b.DeviceName), strings.Compare(a.PoolName, b.PoolName))
	})
	return report
}

// statusOf returns the status for the kubelet. A condition that is only informative leaves a device
// healthy, and appears as the report's message.
func statusOf(health discovery.Health) kubeletplugin.HealthStatus {
	switch {
	case health.IsUsable():
		return kubeletplugin.HealthStatusHealthy
	case health.Status == discovery.Unhealthy:
		return kubeletplugin.HealthStatusUnhealthy
	}
	return kubeletplugin.HealthStatusUnknown
}

// statusLoop keeps the status of claims up to date until the context ends.
func (d *Driver) statusLoop(ctx context.Context) {
	if d.config.StatusClient == nil {
		return
	}
	w := claimstatus.NewWriter(d.config.StatusClient.ResourceV1())
	for {
		v := d.view.Load()
		var again <-chan time.Time
		if v.snapshot != nil {
			if next := w.WriteStatuses(ctx, d.ledger.Claims(), d.healthIn(v)); !next.IsZero() {
				again = time.After(time.Until(next))
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-v.next:
		case <-d.claimPrepared:
			d.untilQuiet(ctx, v)
		case <-again:
		}
	}
}

// untilQuiet returns when no claim was prepared for statusQuiet, at the latest after ten times
// statusQuiet, or when there is a newer view. The writes should not compete with starting pods, and
// the claims of a burst are then processed together.
func (d *Driver) untilQuiet(ctx context.Context, v *view) {
	limit := time.NewTimer(10 * statusQuiet)
	defer limit.Stop()
	for {
		quiet := time.NewTimer(statusQuiet)
		select {
		case <-d.claimPrepared:
			quiet.Stop()
			continue
		case <-ctx.Done():
		case <-v.next:
		case <-limit.C:
		case <-quiet.C:
		}
		quiet.Stop()
		return
	}
}
