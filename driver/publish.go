package driver

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"chandler.dev/discovery"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
)

// sayAfter is how often it is said that the API server does not answer.
const sayAfter = 30 * time.Second

// repeatFor is for how long after a registration the driver says again what is
// published, at pauses that double from a second. A kubelet that starts deletes
// all slices of its node, and so does one from which a driver was cut off for
// 30 s (pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go); the library would make
// them anew 30 s later (resourceslice.DefaultSyncDelay). To say it again writes
// nothing that is there.
const repeatFor = 15 * time.Second

// retryAfter is how long after a failed write the driver says again what is to be published. The library's own
// pauses double with each failure in a row, up to 1,000 s (workqueue.DefaultTypedControllerRateLimiter in client-go
// 0.37), and a kubelet that starts meanwhile leaves the node without slices for as long.
const retryAfter = time.Minute

// publisher is what decides when slices are published and when the API server is
// asked what it keeps of them.
type publisher struct {
	wanted  *resourceslice.Pool // what should be published, nil before the first scan
	changes time.Time           // when that changes by itself, zero if it does not
	last    *resourceslice.Pool // what was published last, nil before the first time
	said    time.Time           // when it was published, or said again

	registered time.Time // when the kubelet last registered the driver, zero if it has not
	failed     time.Time // when the library first failed to write what it was given, zero if it is not known to have

	began     time.Time
	due       time.Time // when the API server is to be asked again
	heard     bool      // it has said what it keeps, or goes on refusing to
	confirmed bool      // it has done so with what is wanted in view
	silent    time.Time // when it last failed to, zero if it did not
}

// step is what the publisher does next.
type step string

const (
	wait    step = "wait"
	ask     step = "ask" // what the API server keeps
	publish step = "publish"
)

// next returns what to do now, and how long to wait if that is nothing.
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

// unsaid reports whether something else should be published than is.
func (p *publisher) unsaid() bool {
	return p.wanted != nil && p.wanted != p.last && (p.last == nil || !equality.Semantic.DeepEqual(*p.last, *p.wanted))
}

// waits reports whether the API server must say what it keeps before something is
// published. A server that has begun to drop counters keeps those that it has.
func (p *publisher) waits() bool {
	return !p.heard || !p.confirmed && p.last != nil && p.unsaid() && pool.CompeteAnew(*p.last, *p.wanted)
}

// again returns when to say again what is published, zero if that is not needed.
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

// given returns what the library is to be given: the same as last, if anything else has to wait.
func (p *publisher) given() *resourceslice.Pool {
	if p.waits() {
		return p.last
	}
	return p.wanted
}

// hear takes over whether the API server has said what it keeps. It is to be
// asked again after a time.
func (p *publisher) hear(err error, now time.Time, again time.Duration) {
	said := err == nil || refused(err) && (p.heard || now.Sub(p.began) >= refusalPause)
	p.heard, p.confirmed, p.due = p.heard || said, said && p.unsaid(), now.Add(again)
	if p.silent = now; said {
		p.silent = time.Time{}
	}
}

// earlier returns the earlier of two times, of which zero is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// publishLoop publishes, and asks the API server what it keeps of slices, until
// the context ends. It looks again when it is woken.
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
			if err := d.publish(ctx, helper, *given); err != nil {
				return err
			}
			p.last, p.said, p.confirmed = given, time.Now(), false
			d.published.Store(p.last)
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

// look makes the publisher see how things are.
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
	wanted, problems := pool.Of(in)
	p.wanted, p.changes = &wanted, changes
	if !p.unsaid() {
		p.wanted = p.last // which is quickly seen to be the same
	}
	return problems
}

// publish publishes. The first time the helper waits until the API server has
// listed what slices there are, whatever becomes of the context; that must not
// keep the driver from ending. It returns when its own context ends, which it
// does right after this one.
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

// input returns what decides what is to be published of a view, and when that
// changes by itself, zero if it does not.
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

// Published returns how many ResourceSlices the library was last given to publish,
// and how many devices are in them. It reports false before the first time.
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

// kept returns what the API server is known to keep.
func (d *Driver) kept() features.Set { return ptr.Deref(d.features.Load(), features.Set{}) }

// notify puts a value into a channel with room for one, unless one waits in it.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
