package driver

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"chandler.dev/discovery"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
)

// sayAfter is the interval of the log message about an API server that does not answer.
const sayAfter = 30 * time.Second

// repeatFor is how long after a registration the driver repeats the publication, with pauses that
// double from one second. A kubelet that starts deletes all slices of its node, and so does a
// kubelet that was disconnected from a driver for 30 s
// (pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go). The library alone would create them again 30 s
// later (resourceslice.DefaultSyncDelay). A repetition does not write existing slices.
const repeatFor = 15 * time.Second

// retryAfter is the time between a failed write and the next publication. The library's own delays
// double with each consecutive failure, up to 1,000 s (workqueue.DefaultTypedControllerRateLimiter
// in client-go 0.37), and a kubelet that starts in the meantime would leave the node without slices
// for that time.
const retryAfter = time.Minute

// publisher decides when to publish slices and when to detect the API server's features.
type publisher struct {
	wanted   *resourceslice.Pool // the pool to publish, nil before the first scan
	problems []discovery.Problem // why wanted lacks devices
	from     pool.Input          // input of wanted
	beside   *resourceslice.Pool // last at the time when wanted was computed
	changes  time.Time           // when wanted changes without an event, zero if it does not
	last     *resourceslice.Pool // the last published pool, nil before the first
	said     time.Time           // time of the last publication or repetition

	registered time.Time // time of the kubelet's last registration, zero if there was none
	failed     time.Time // first failed write of the present pool, zero if there was none

	began     time.Time
	due       time.Time // time of the next detection of features
	heard     bool      // the features were detected, or the server has refused for long enough
	confirmed bool      // features were detected while wanted was pending
	silent    time.Time // time of the last failed detection, zero after a success
}

// step is the publisher's next action.
type step string

const (
	wait    step = "wait"
	ask     step = "ask" // detect the API server's features
	publish step = "publish"
)

// next returns the next action, and for wait the time until which to wait.
func (p *publisher) next(now time.Time) (do step, until time.Time) {
	due, waits := p.due, p.waits()
	if waits {
		due = earlier(due, p.silent.Add(negotiatePause))
	}
	again := p.again()
	switch {
	case !now.Before(due):
		return ask, now
	case !waits && p.unsaid(), !again.IsZero() && !now.Before(again):
		return publish, now
	}
	return wait, earlier(earlier(due, again), p.changes)
}

// unsaid reports whether the wanted pool differs from the published one.
func (p *publisher) unsaid() bool {
	return p.wanted != nil && p.wanted != p.last && (p.last == nil || !equality.Semantic.DeepEqual(*p.last, *p.wanted))
}

// waits reports whether features must be detected before the next publication. A server that now
// drops counters keeps those of existing slices.
func (p *publisher) waits() bool {
	return !p.heard || !p.confirmed && p.last != nil && p.unsaid() && pool.CompeteAnew(*p.last, *p.wanted)
}

// again returns the time of the next repetition, or zero.
func (p *publisher) again() time.Time {
	if p.last == nil {
		return time.Time{}
	}
	var retry time.Time
	if !p.failed.IsZero() {
		retry = p.failed.Add(retryAfter)
	}
	if p.registered.IsZero() {
		return retry
	}
	for after := time.Second; after <= repeatFor; after = 2*after + time.Second {
		if at := p.registered.Add(after); at.After(p.said) {
			return earlier(retry, at)
		}
	}
	return retry
}

// given returns the pool for the library. It is the last pool if the wanted one must wait for the
// detection of features.
func (p *publisher) given() *resourceslice.Pool {
	if p.waits() {
		return p.last
	}
	return p.wanted
}

// hear stores the result of a detection. The next detection is due after the duration again.
func (p *publisher) hear(err error, now time.Time, again time.Duration) {
	said := err == nil || refused(err) && (p.heard || now.Sub(p.began) >= refusalPause)
	p.heard, p.confirmed, p.due = p.heard || said, said && p.unsaid(), now.Add(again)
	if p.silent = now; said {
		p.silent = time.Time{}
	}
}

// earlier returns the earlier of two times. A zero time means none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// publishLoop publishes slices and detects the API server's features until the context ends. Values
// in d.wake start the next round.
func (d *Driver) publishLoop(ctx context.Context, helper Helper) error {
	p := &publisher{began: time.Now()}
	reason := ""
	for ctx.Err() == nil {
		problems := d.look(p)
		switch do, until := p.next(time.Now()); do {
		case ask:
			reason = d.ask(ctx, p, reason)
		case publish:
			given := p.given()
			if given != p.last {
				for _, problem := range problems {
					klog.FromContext(ctx).Error(problem.Err, "A device is left out of the ResourceSlices", "device", problem.Device)
				}
			}
			p.failed = time.Time{}
			d.published.Store(given)
			if err := d.publish(ctx, helper, *given); err != nil {
				return err
			}
			p.last, p.said, p.confirmed = given, time.Now(), false
		case wait:
			timer := time.NewTimer(time.Until(until))
			select {
			case <-ctx.Done():
			case <-d.wake:
			case <-timer.C:
			}
			timer.Stop()
		}
	}
	return nil
}

// look updates the publisher with the present state of the driver.
func (d *Driver) look(p *publisher) []discovery.Problem {
	if d.doubted.Swap(false) {
		p.due = time.Time{}
	}
	if at := d.failed.Swap(nil); at != nil && p.failed.IsZero() {
		p.failed = *at
	}
	if r := d.registration.Load(); r.answer == Accepted {
		p.registered = r.at
	}
	v, now := d.view.Load(), time.Now()
	if v.snapshot == nil {
		return nil
	}
	in, changes := d.input(v, ptr.Deref(p.last, resourceslice.Pool{}), now)
	p.changes = changes
	if p.wanted != nil && p.beside == p.last && sameInput(p.from, in) {
		return p.problems
	}
	wanted, problems := pool.Of(in)
	p.wanted, p.problems, p.from, p.beside = &wanted, problems, in, p.last
	if !p.unsaid() {
		p.wanted = p.last // the same pointer makes later comparisons fast
	}
	return problems
}

// sameInput reports whether two inputs make the same pool, if the last published pool is the same.
func sameInput(a, b pool.Input) bool {
	return a.Snapshot == b.Snapshot && maps.Equal(a.Withheld, b.Withheld) && slices.Equal(a.Claims, b.Claims) &&
		a.Features == b.Features && maps.Equal(a.Excused, b.Excused) && a.Gone == b.Gone
}

// publish gives the pool to the helper. Its first call blocks until the API server has listed the
// existing slices, even after the context has ended. To let the driver stop, publish does not wait
// for the call then. The call ends with its own context, soon afterwards.
func (d *Driver) publish(ctx context.Context, helper Helper, now resourceslice.Pool) error {
	resources := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.config.NodeName: now}}
	published := make(chan error, 1)
	go func() { published <- helper.PublishResources(ctx, resources) }()
	for {
		select {
		case err := <-published:
			if err != nil {
				return fmt.Errorf("publish: %w", err)
			}
			return nil
		case <-ctx.Done():
			return nil
		case <-time.After(sayAfter):
			klog.FromContext(ctx).Info("Publishing ResourceSlices waits for the API server to answer")
		}
	}
}

// input returns the input of the pool for a view. The second result is when the input changes
// without an event, or zero.
func (d *Driver) input(v *view, last resourceslice.Pool, now time.Time) (in pool.Input, changes time.Time) {
	in = pool.Input{
		Snapshot: v.snapshot,
		Withheld: v.withheld,
		Claims:   d.ledger.Claims(),
		Last:     last,
		Features: d.kept(),
		Excused:  make(map[string]bool),
		Gone:     d.config.Gone(),
	}
	for _, device := range v.snapshot.Devices {
		if device.Health.Status != discovery.Unknown {
			continue
		}
		if left := d.jobs.excuse(device.Name, now); left > 0 {
			in.Excused[device.Name] = true
			changes = earlier(changes, now.Add(left))
		}
	}
	return in, changes
}

// Published returns the number of ResourceSlices and devices in the last pool given to the library.
// It reports false before the first publication.
func (d *Driver) Published() (slices, devices int, known bool) {
	last := d.published.Load()
	if last == nil {
		return 0, 0, false
	}
	for i := range last.Slices {
		devices += len(last.Slices[i].Devices)
	}
	return len(last.Slices), devices, true
}

// kept returns the known features of the API server.
func (d *Driver) kept() features.Set { return ptr.Deref(d.features.Load(), features.Set{}) }

// notify sends a value to a channel with a buffer of one, unless the buffer is full.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
