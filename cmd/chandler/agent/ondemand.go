package agent

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ondemand"
)

// madeDir is the directory of the records of created units of earlier versions.
const madeDir = "made"

// newOnDemand creates the [ondemand.Manager], which creates devices on demand.
func (a *agent) newOnDemand() *ondemand.Manager {
	return ondemand.New(ondemand.Config{
		Host:     a.host,
		Families: a.Families,
		Tools:    discovery.Tools{Write: a.Write, CheckBusy: a.checkUse},
		Programs: a.guardPrograms(),
		Journal:  a.journalConfig(),
		Earlier:  filepath.Join(a.StateDir, madeDir),
		Device:   a.describedAs,
		Ledger:   a.ledger,
		Stock:    a.stock,
		Changed: func() {
			a.requestScan()
			notify(a.unitIdle)
		},
	})
}

// configurer returns the steps that prepare devices for a consumer: the device is created, then
// bound to a driver, and then configured by its family.
func (a *agent) configurer() discovery.Configurer {
	return a.onDemand.Configurer(a.passthrough.Configurer(a.requireLease(discovery.JoinConfigurers(a.host, a.Families))))
}

// stock returns the devices of the host as both APIs offer them.
func (a *agent) stock() ledger.Stock {
	if p := a.placedDevices.Load(); p != nil {
		return &ledger.Present{Snapshot: p.Snapshot}
	}
	return &ledger.Present{}
}

// describedAs returns a device as both APIs offer the device.
func (a *agent) describedAs(name string) (discovery.Device, bool) {
	p := a.placedDevices.Load()
	if p == nil {
		return discovery.Device{}, false
	}
	d, found := p.Snapshot.Lookup(name)
	return d.Device, found
}

// checkUse returns the users of the functions as an error, nil if all are free; see
// [discovery.Tools].
func (a *agent) checkUse(keep bool, functions ...sysfs.Device) error {
	return a.checkLimited(functions[0], func(options inuse.Options) error { return inuse.CheckFree(a.finder, options, keep, functions...) })
}

// openOnDemand loads the records of units that an earlier agent created.
func (a *agent) openOnDemand(ctx context.Context) {
	for _, problem := range a.onDemand.Open() {
		klog.FromContext(ctx).Error(problem, "Recovering devices that were created on demand")
	}
	notify(a.unitIdle)
}

// undoMade removes units that were created on demand after their devices have had no consumer for a
// while, unless an extended resource lists a device of the unit.
func (a *agent) undoMade(ctx context.Context) {
	since := make(map[string]time.Time) // by unit, the time since which no consumer has a device of the unit
	attempts := newAttempts("Devices that were created on demand are not removed")
	unwritten := false
	for {
		freed := a.ledger.FreedSignal()
		problems, unread := a.onDemand.ReadAgain()
		for _, problem := range problems {
			klog.FromContext(ctx).Error(problem, "Recovering devices that were created on demand")
		}
		unwritten = restoreRecords(ctx, a.onDemand.RestoreRecords, "devices that were created on demand", unwritten)
		p, all := a.placedDevices.Load(), a.onDemand.CreatedUnits()
		maps.DeleteFunc(since, func(unit string, _ time.Time) bool {
			return !slices.ContainsFunc(all, func(made ondemand.CreatedUnit) bool { return made.Unit == unit })
		})
		wanted, waiting, pause := a.wantedUnits(p, all), make(map[string]bool), refuseInterval
		for _, made := range all {
			if wanted[made.Unit] {
				delete(since, made.Unit)
				continue
			}
			if since[made.Unit].IsZero() {
				since[made.Unit] = time.Now()
			}
			if last := a.lastRequested(devicesOf(p, &made)); last.After(since[made.Unit]) {
				since[made.Unit] = last
			}
			if left := a.settings.Load().IdleTime - time.Since(since[made.Unit]); left > 0 && !p.IsLeaving {
				pause = min(pause, left)
			} else if waiting[made.Unit] = true; attempts.isDue(made.Unit) {
				attempts.recordResult(ctx, made.Unit, a.undoUnit(ctx, p, &made))
			}
		}
		var again <-chan time.Time
		if len(all) > 0 || unread {
			again = time.After(min(pause, attempts.pause(waiting)))
		} else {
			freed = nil
		}
		select {
		case <-ctx.Done():
			return
		case <-a.unitIdle:
		case <-freed:
		case <-again:
		}
	}
}

// noteRequested stores the present time for each device that a claim requests. By the next check for
// consumers, the claim may have ended.
func (a *agent) noteRequested(claim *resourceapi.ResourceClaim) {
	if claim.Status.Allocation == nil {
		return
	}
	for _, r := range claim.Status.Allocation.Devices.Results {
		if r.Driver == discovery.Domain {
			a.lastClaims.Store(r.Device, time.Now())
		}
	}
}

// lastRequested returns the time of the last claim for one of the devices.
func (a *agent) lastRequested(devices []string) (last time.Time) {
	for _, device := range devices {
		if at, _ := a.lastClaims.Load(device); at != nil && at.(time.Time).After(last) {
			last = at.(time.Time)
		}
	}
	return last
}

// wantedUnits returns the units with a device that has a consumer or that an extended resource
// lists.
func (a *agent) wantedUnits(p *placement.Placed, all []ondemand.CreatedUnit) map[string]bool {
	wanted := make(map[string]bool)
	if len(all) == 0 {
		return wanted
	}
	listed := make(map[string]bool) // devices
	if p != nil && !p.IsLeaving {
		for _, d := range p.Placement.ListedDevices(p.Snapshot.Devices) {
			listed[d.Name] = len(d.Offers) > 0
		}
	}
	view := a.ledger.View(nil)
	for _, made := range all {
		wanted[made.Unit] = p == nil || slices.ContainsFunc(devicesOf(p, &made), func(device string) bool { return listed[device] || view.Has(device) })
	}
	return wanted
}

// devicesOf returns the devices of a unit: the devices that were planned, and the devices that
// appeared. The kernel may assign virtual functions other addresses than it had announced.
func devicesOf(p *placement.Placed, made *ondemand.CreatedUnit) []string {
	devices := slices.Clone(made.Devices)
	for i := range p.Snapshot.Devices {
		if d := &p.Snapshot.Devices[i]; d.Creation == nil && d.Attributes.String("parent") == made.Unit && !slices.Contains(devices, d.Name) {
			devices = append(devices, d.Name)
		}
	}
	return devices
}

// undoUnit removes a unit, unless a consumer has one of its devices.
func (a *agent) undoUnit(ctx context.Context, p *placement.Placed, made *ondemand.CreatedUnit) error {
	var blocked *ledger.Blocked
	removed, err := a.onDemand.RemoveUnit(ctx, made.Unit, devicesOf(p, made)...)
	switch {
	case errors.As(err, &blocked):
		return nil
	case err != nil:
		return err
	case !removed:
		klog.FromContext(ctx).Info("Removed nothing of a unit that was created on demand, because its devices are gone, or another program has changed them", "unit", made.Unit)
		return nil
	}
	klog.FromContext(ctx).Info("Removed what was created on demand, since no consumer has it", "unit", made.Unit)
	return nil
}
