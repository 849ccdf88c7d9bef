package driver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/ledger/exclusion"
)

// view is a snapshot with data derived from it. It is never modified.
type view struct {
	snapshot *rules.Snapshot   // nil before the first scan
	withheld map[string]string // by physical device: why no new consumer can have it
	*exclusion.Present
	identities map[string]identity // by device name, for devices that have or had an identity
	next       chan struct{}       // closed when a newer view has replaced this one
}

// identity is the last known identity of a device, and the one before.
type identity struct {
	now, before string // before is "" if there was no other

	// promisedTo are the claims that had the device in their allocation when its replacement was
	// detected, with the times of their allocations. It is nil before the API server has answered.
	promisedTo *atomic.Pointer[map[types.UID]metav1.Time]
}

// views holds the present view.
type views struct {
	atomic.Pointer[view]
	replacing sync.Mutex // held while a view is replaced
}

// Publish sets the snapshot that the driver offers, without the withheld physical devices. The
// values of withheld are reasons. Only claims that were already allocated a withheld device can get
// it. The caller must not modify the arguments afterwards.
func (d *Driver) Publish(snapshot *rules.Snapshot, withheld map[string]string) {
	d.view.replace(snapshot, withheld)
	d.Publisher.NoteChange()
}

func (v *views) replace(snapshot *rules.Snapshot, withheld map[string]string) {
	v.replacing.Lock()
	defer v.replacing.Unlock()
	before := v.Load()
	v.Store(&view{
		snapshot: snapshot, withheld: withheld, Present: &exclusion.Present{Snapshot: snapshot},
		identities: identitiesIn(snapshot, before.identities), next: make(chan struct{}),
	})
	close(before.next)
}

// poolInput returns the present input of the pools; see [publish.Config].
func (d *Driver) poolInput(now time.Time) (in pool.Input, changes time.Time) {
	v := d.view.Load()
	if v.snapshot == nil {
		return pool.Input{}, time.Time{}
	}
	in = pool.Input{
		Node:          d.config.NodeName,
		Snapshot:      v.snapshot,
		Withheld:      v.withheldFromSlices(),
		Claims:        d.ledger.Claims(),
		ExcusedHealth: make(map[string]bool),
		Returning:     make(map[string]bool),
		GoneEffect:    d.config.GoneEffect(),
	}
	note := func(devices map[string]bool, device string, left time.Duration) {
		if left <= 0 {
			return
		}
		devices[device] = true
		if end := now.Add(left); changes.IsZero() || end.Before(changes) {
			changes = end
		}
	}
	for i := range v.snapshot.Devices {
		device := &v.snapshot.Devices[i].Device
		if device.Health.Status == discovery.Unknown {
			note(in.ExcusedHealth, device.Name, d.claims.jobs.excuseFor(device.Name, now))
		}
		note(in.Returning, device.Name, d.claims.returnsFor(device, now))
	}
	return in, changes
}

// withheldFromSlices returns the physical devices that no slice contains, with reasons. They include
// replaced devices whose earlier claims are not known yet: a claim that got such a device now could
// not be told from a claim for the earlier device, and would be refused for good.
func (v *view) withheldFromSlices() map[string]string {
	withheld := make(map[string]string)
	maps.Copy(withheld, v.withheld)
	for name, seen := range v.identities {
		if device, found := v.snapshot.Lookup(name); found && seen.promisedTo != nil && seen.promisedTo.Load() == nil {
			withheld[device.Silicon()] = "it was replaced, and the claims for the earlier device are not known yet"
		}
	}
	return withheld
}

// identitiesIn adds the identities of a snapshot to the known ones. A device keeps its identity
// while it has vanished or its identity cannot be read.
func identitiesIn(snapshot *rules.Snapshot, known map[string]identity) map[string]identity {
	changed := make(map[string]identity)
	for _, device := range snapshot.Devices {
		last, seen := known[device.Name]
		switch {
		case device.Identity == "" || device.Identity == last.now:
		case seen:
			changed[device.Name] = identity{now: device.Identity, before: last.now, promisedTo: new(atomic.Pointer[map[types.UID]metav1.Time])}
		default:
			changed[device.Name] = identity{now: device.Identity}
		}
	}
	if len(changed) == 0 {
		return known
	}
	for name, last := range known {
		if _, found := changed[name]; !found {
			changed[name] = last
		}
	}
	return changed
}

// Device returns the device for an allocated name. It implements [exclusion.Stock].
func (v *view) Device(name string) (rules.Offered, bool) {
	if v.snapshot == nil {
		return rules.Offered{}, false
	}
	return pool.LookupDevice(v.snapshot, name)
}

// missingReason returns the reason why a device of that name does not exist. If the device cannot
// be read, or a family has not answered, as in the first seconds of an agent on a busy node, the
// error is temporary.
func (v *view) missingReason(pool, device string) error {
	for _, problem := range v.snapshot.Problems {
		if problem.Device == device && problem.IsUnread() || errors.Is(problem.Err, discovery.ErrNoAnswer) {
			return discovery.TransientError(withRefusal(RefusedWaiting, fmt.Errorf("device %s/%s is not yet known: %w", pool, device, problem)))
		}
	}
	return fmt.Errorf("device %s/%s is gone from this node", pool, device)
}

// await returns the present view once it has a snapshot.
func (v *views) await(ctx context.Context, stopping <-chan struct{}) (*view, error) {
	for {
		present := v.Load()
		if present.snapshot != nil {
			return present, nil
		}
		select {
		case <-present.next:
		case <-stopping:
			return nil, errStopping
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the first scan of the host: %w", ctx.Err())
		}
	}
}
