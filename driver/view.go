package driver

import (
	"context"
	"fmt"
	"strings"
	"time"

	"chandler.dev/discovery"
)

// view is a snapshot and what is made of it. It is never modified.
type view struct {
	snapshot *discovery.Snapshot // nil before the first
	taken    time.Time
	health   map[string]reading
	next     chan struct{} // closed when another view has replaced this one
}

// reading is the health of a device over time.
type reading struct {
	now   discovery.Health
	known discovery.Health // what it was when it was last not Unknown
	never bool             // it has always been Unknown
	since time.Time        // when it became Unknown
}

// Publish makes the snapshot what the driver offers: all of its devices but
// those that are withheld, which only claims that have them already can get.
// The snapshot must not be modified any more.
func (d *Driver) Publish(snapshot *discovery.Snapshot) {
	d.publishing.Lock()
	defer d.publishing.Unlock()
	before := d.view.Load()
	d.view.Store(before.after(snapshot, time.Now()))
	close(before.next)
}

// after returns the view that follows on v.
func (v *view) after(snapshot *discovery.Snapshot, now time.Time) *view {
	following := &view{snapshot: snapshot, taken: now, health: make(map[string]reading), next: make(chan struct{})}
	for _, device := range snapshot.Devices {
		before, seen := v.health[device.Name]
		r := reading{now: device.Health, known: before.known, never: before.never || !seen, since: before.since}
		switch {
		case device.Health.Status != discovery.Unknown:
			r.known, r.never = device.Health, false
		case !seen || before.now.Status != discovery.Unknown:
			r.since = now
		}
		following.health[device.Name] = r
	}
	return following
}

// unknown returns for how long the health is unknown, zero if it is known.
func (r reading) unknown(at time.Time) time.Duration {
	if r.now.Status != discovery.Unknown {
		return 0
	}
	return at.Sub(r.since)
}

// settled returns the health with short times of not knowing smoothed over.
func (r reading) settled(at time.Time, unknownAfter time.Duration) discovery.Health {
	if r.now.Status == discovery.Unknown && r.unknown(at) < unknownAfter && !r.never {
		return r.known
	}
	return r.now
}

// lookup finds a device of the snapshot.
func (v *view) lookup(name string) (discovery.Device, bool) {
	if v.snapshot == nil {
		return discovery.Device{}, false
	}
	return v.snapshot.Lookup(name)
}

// allocated finds the device that an allocated name stands for: itself, or the
// shared device of which it is a numbered share.
func (v *view) allocated(name string) (discovery.Device, bool) {
	if device, found := v.lookup(name); found {
		return device, true
	}
	shared, number, ok := cutLast(name, shareInfix)
	if !ok || number == "" || strings.Trim(number, "0123456789") != "" {
		return discovery.Device{}, false
	}
	device, found := v.lookup(shared)
	return device, found && sharesOf(&device) > 0
}

func cutLast(s, separator string) (before, after string, found bool) {
	i := strings.LastIndex(s, separator)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(separator):], true
}

// wait returns the present view once there is one with a snapshot.
func (d *Driver) wait(ctx context.Context) (*view, error) {
	for {
		v := d.view.Load()
		if v.snapshot != nil {
			return v, nil
		}
		select {
		case <-v.next:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the first scan of the host: %w", ctx.Err())
		}
	}
}
