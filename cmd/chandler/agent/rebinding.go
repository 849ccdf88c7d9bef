package agent

import (
	"cmp"
	"context"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/rebind"
)

// Intervals at which it is tried to give a device back: while somebody has it, and after
// that failed.
const (
	heldInterval   = time.Second
	refuseInterval = 10 * time.Second
)

// newBinder makes what gives devices to vfio and back.
func (a *agent) newBinder() *rebind.Binder {
	config := rebind.Config{
		Host:  a.host,
		Write: a.Write,
		Busy:  a.busy,
		Files: a.files(),
		Dir:   filepath.Join(a.StateDir, "rebound"),
		Boot:  a.BootID,
		Changed: func() {
			notify(a.events)
			notify(a.rebound)
		},
	}
	for _, f := range a.Families {
		if f.Rebinds {
			config.Family = f.Name
		}
	}
	return rebind.New(config)
}

// busy returns who uses a function, nil if nobody does.
func (a *agent) busy(function sysfs.Device) error {
	var known []discovery.Device
	if s := a.settled.Load(); s != nil {
		known = s.Devices
	}
	return inuse.Of(a.host, function, inuse.Options{Known: known}).Err()
}

// openBinder takes over what an earlier agent has rebound.
func (a *agent) openBinder(ctx context.Context) {
	for _, problem := range a.binder.Open() {
		klog.FromContext(ctx).Error(problem, "Recovering what is rebound")
	}
	notify(a.rebound)
}

// giveBack gives devices that were rebound back to the drivers that they had, once nobody
// has them and no classic resource wants them so. Until then they are nobody's but those
// who ask for them as they are.
func (a *agent) giveBack(ctx context.Context) {
	tried := make(map[string]time.Time) // by unit, when it could not be given back
	said := make(map[string]string)     // likewise, why
	for {
		var again <-chan time.Time
		left := make(map[string][]rebind.Left) // by unit
		for _, l := range a.binder.Left() {
			left[l.Unit] = append(left[l.Unit], l)
			again = time.After(heldInterval)
		}
		if p := a.placed.Load(); p != nil && len(left) > 0 {
			wanted := p.rebound()
			for unit, functions := range left {
				if wanted[unit] || time.Since(tried[unit]) < refuseInterval {
					continue
				}
				delete(tried, unit)
				if err := a.giveUnit(ctx, p, functions); err != nil {
					tried[unit] = time.Now()
					if said[unit] != err.Error() {
						klog.FromContext(ctx).Error(err, "A device is not given back to its driver; trying again", "device", unit, "interval", refuseInterval)
					}
					said[unit] = err.Error()
				} else {
					delete(said, unit)
				}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-a.rebound:
		case <-again:
		}
	}
}

// giveUnit gives back all functions of one unit, unless somebody has any of it.
func (a *agent) giveUnit(ctx context.Context, p *placed, functions []rebind.Left) error {
	api := cmp.Or(p.placement.API[functions[0].Silicon], discovery.ModeDRA)
	release, blocked := a.ledger.ReserveDevice(api, functions[0].Device, functions[0].Silicon, &ledger.Present{Snapshot: p.snapshot})
	if blocked != nil {
		return nil
	}
	defer release()
	for _, f := range functions {
		if err := a.binder.Give(ctx, f.Function); err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Gave a device back to the driver that it had", "device", f.Device)
	}
	return nil
}

// rebound returns the units that classic resources want under vfio.
func (p *placed) rebound() map[string]bool {
	wanted := make(map[string]bool)
	if p.leaving {
		return wanted
	}
	for _, d := range p.placement.Classic(p.snapshot.Devices) {
		if wantsVFIO(&d) {
			wanted[rebind.Unit(&d.Device)] = true
		}
	}
	return wanted
}

func wantsVFIO(d *rules.Offered) bool {
	return d.Want[discovery.Driver] == discovery.DriverVFIO && len(d.Offers) > 0
}
