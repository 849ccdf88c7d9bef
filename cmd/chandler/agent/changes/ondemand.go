package changes

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/ondemand"
)

// EarlierOnDemandDir is the directory of the records of created units of earlier versions.
const EarlierOnDemandDir = "made"

// newOnDemand creates the [ondemand.Manager], which creates devices on demand.
func (c *Manager) newOnDemand() *ondemand.Manager {
	return ondemand.New(ondemand.Config{
		Host:     c.config.Host,
		Families: c.config.Families,
		Tools:    discovery.Tools{Write: c.write, CheckBusy: c.uses.checkUse},
		Programs: c.guard.guardPrograms(c.config.Programs),
		Journal:  c.config.Journal,
		Earlier:  filepath.Join(c.config.StateDir, EarlierOnDemandDir),
		Device:   c.describedAs,
		Ledger:   c.config.Ledger,
		Stock:    c.stock,
		Changed: func() {
			c.config.RequestScan()
			c.removals.checkSoon()
		},
	})
}

// createdUnits are the units that were created on demand, with the time since which they have no
// consumer.
type createdUnits struct {
	manager  *ondemand.Manager
	ledger   *ledger.Ledger
	placed   func() *placement.Placed // nil before devices are placed
	idleTime func() time.Duration     // how long a unit remains without a consumer

	idleSince map[string]time.Time // by unit, the time since which no consumer has a device of the unit; used by list only
	lastUses  sync.Map             // time when the last consumer of a device ended, by device
}

// list lists the units. A unit may be removed after its devices have had no consumer for a while,
// unless an extended resource lists a device of the unit.
func (u *createdUnits) list() (units []undoable) {
	p, all := u.placed(), u.manager.CreatedUnits()
	maps.DeleteFunc(u.idleSince, func(unit string, _ time.Time) bool {
		return !slices.ContainsFunc(all, func(made ondemand.CreatedUnit) bool { return made.Unit == unit })
	})
	wanted := u.wantedUnits(p, all)
	for _, made := range all {
		units = append(units, undoable{
			unit: made.Unit,
			stays: func() time.Duration {
				if wanted[made.Unit] {
					delete(u.idleSince, made.Unit)
					return RetryInterval
				}
				left := u.remainingIdleTime(&made)
				if p.IsLeaving {
					return 0
				}
				return left
			},
			undo: func(ctx context.Context) error { return u.removeUnit(ctx, made.Unit) },
		})
	}
	return units
}

// remainingIdleTime returns how long a unit without a consumer remains, 0 or less if it may be
// removed.
func (u *createdUnits) remainingIdleTime(made *ondemand.CreatedUnit) time.Duration {
	if u.idleSince[made.Unit].IsZero() {
		u.idleSince[made.Unit] = time.Now()
	}
	if last := u.lastUse(made.Devices); last.After(u.idleSince[made.Unit]) {
		u.idleSince[made.Unit] = last
	}
	return u.idleTime() - time.Since(u.idleSince[made.Unit])
}

// Write implements [ledger.Output]. A unit remains while a consumer has one of its devices.
func (u *createdUnits) Write(allocation.Entry) error { return nil }

// Remove implements [ledger.Output]: it stores the present time for each device of a consumer that
// ends. The consumer may have begun after the last check for consumers.
func (u *createdUnits) Remove(e allocation.Entry, _ []allocation.Entry) error {
	for _, h := range e.Holds() {
		u.lastUses.Store(h.Device, time.Now())
	}
	return nil
}

// RemoveOrphans implements [ledger.Output].
func (u *createdUnits) RemoveOrphans(func(types.UID, func() error) (bool, error)) error { return nil }

// lastUse returns the last time when a consumer of one of the devices ended.
func (u *createdUnits) lastUse(devices []string) (last time.Time) {
	for _, device := range devices {
		if at, _ := u.lastUses.Load(device); at != nil && at.(time.Time).After(last) {
			last = at.(time.Time)
		}
	}
	return last
}

// wantedUnits returns the units with a device that has a consumer or that an extended resource
// lists.
func (u *createdUnits) wantedUnits(p *placement.Placed, all []ondemand.CreatedUnit) map[string]bool {
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
	view := u.ledger.View(nil)
	for _, made := range all {
		wanted[made.Unit] = p == nil || slices.ContainsFunc(made.Devices, func(device string) bool { return listed[device] || view.Has(device) })
	}
	return wanted
}

// removeUnit removes a unit, unless a consumer has one of its devices.
func (u *createdUnits) removeUnit(ctx context.Context, unit string) error {
	var blocked *exclusion.Blocked
	removed, err := u.manager.RemoveUnit(ctx, unit)
	switch {
	case errors.As(err, &blocked):
		return nil
	case err != nil:
		return err
	case !removed:
		klog.FromContext(ctx).Info("Removed nothing of a unit that was created on demand, because its devices are gone, or another program has changed them", "unit", unit)
		return nil
	}
	klog.FromContext(ctx).Info("Removed what was created on demand, since no consumer has it", "unit", unit)
	return nil
}
