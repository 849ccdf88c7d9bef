package driver

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/wait"
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
	wanted          *resourceslice.Pool // the pool to publish, nil before the first scan
	problems        []discovery.Problem // why wanted lacks devices
	wantedInput     pool.Input          // input of wanted
	lastBeside      *resourceslice.Pool // last at the time when wanted was computed
	nextChange      time.Time           // when wanted changes without an event, zero if it does not
	last            *resourceslice.Pool // the last published pool, nil before the first
	lastPublication time.Time           // time of the last publication or repetition

	lastRegistration time.Time // time of the kubelet's last registration, zero if there was none
	firstFailure     time.Time // first failed write of the present pool, zero if there was none

	startTime         time.Time
	nextDetection     time.Time // time of the next detection of features
	featuresKnown     bool      // the features were detected, or the server has refused for long enough
	featuresConfirmed bool      // features were detected while wanted was pending
	retryDetection    time.Time // when to detect again if a publication waits for it; zero, for at once, after a success
	retryPause        wait.Backoff
}

// step is the publisher's next action.
type step string

const (
	idle    step = "idle"
	ask     step = "ask" // detect the API server's features
	publish step = "publish"
)

// next returns the next action, and for idle the time until which to wait.
func (p *publisher) next(now time.Time) (do step, until time.Time) {
	due, waits := p.nextDetection, p.waitsForFeatures()
	if waits && p.retryDetection.Before(due) {
		due = p.retryDetection
	}
	again := p.nextRepetition()
	switch {
	case !now.Before(due):
		return ask, now
	case !waits && p.isUnpublished(), !again.IsZero() && !now.Before(again):
		return publish, now
	}
	return idle, earlierOf(earlierOf(due, again), p.nextChange)
}

// isUnpublished reports whether the wanted pool differs from the published one.
func (p *publisher) isUnpublished() bool {
	return p.wanted != nil && p.wanted != p.last && (p.last == nil || !equality.Semantic.DeepEqual(*p.last, *p.wanted))
}

// waitsForFeatures reports whether features must be detected before the next publication. A server
// that now drops counters keeps those of existing slices.
func (p *publisher) waitsForFeatures() bool {
	return !p.featuresKnown || !p.featuresConfirmed && p.last != nil && p.isUnpublished() && pool.CompeteNewly(*p.last, *p.wanted)
}

// nextRepetition returns the time of the next repetition, or zero.
func (p *publisher) nextRepetition() time.Time {
	if p.last == nil {
		return time.Time{}
	}
	var retry time.Time
	if !p.firstFailure.IsZero() {
		retry = p.firstFailure.Add(retryAfter)
	}
	if p.lastRegistration.IsZero() {
		return retry
	}
	for after := time.Second; after <= repeatFor; after = 2*after + time.Second {
		if at := p.lastRegistration.Add(after); at.After(p.lastPublication) {
			return earlierOf(retry, at)
		}
	}
	return retry
}

// nextPool returns the pool for the library. It is the last pool if the wanted one must wait for
// the detection of features.
func (p *publisher) nextPool() *resourceslice.Pool {
	if p.waitsForFeatures() {
		return p.last
	}
	return p.wanted
}

// recordDetection stores the result of a detection. The next detection is due after the duration
// again.
func (p *publisher) recordDetection(err error, now time.Time, again time.Duration) {
	said := err == nil || isRejection(err) && (p.featuresKnown || now.Sub(p.startTime) >= refusalPause)
	p.featuresKnown, p.featuresConfirmed, p.nextDetection = p.featuresKnown || said, said && p.isUnpublished(), now.Add(again)
	if said {
		p.retryDetection, p.retryPause = time.Time{}, NewPause()
		return
	}
	p.retryDetection = now.Add(p.retryPause.Step())
}

// earlierOf returns the earlier of two times. A zero time means none.
func earlierOf(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// publishLoop publishes slices and detects the API server's features until the context ends. Values
// in d.wake start the next round.
func (d *Driver) publishLoop(ctx context.Context, helper Helper) error {
	p := &publisher{startTime: time.Now(), retryPause: NewPause()}
	reason := ""
	for ctx.Err() == nil {
		problems := d.refreshPublisher(p)
		switch do, until := p.next(time.Now()); do {
		case ask:
			reason = d.detectFeatures(ctx, p, reason)
		case publish:
			given := p.nextPool()
			if given != p.last {
				for _, problem := range problems {
					klog.FromContext(ctx).Error(problem.Err, "A device is left out of the ResourceSlices", "device", problem.Device)
				}
			}
			p.firstFailure = time.Time{}
			d.lastPool.Store(given)
			if err := d.publish(ctx, helper, *given); err != nil {
				return err
			}
			p.last, p.lastPublication, p.featuresConfirmed = given, time.Now(), false
		case idle:
			timer := time.NewTimer(time.Until(until))
			select {
			case <-ctx.Done():
			case <-d.wakePublisher:
			case <-timer.C:
			}
			timer.Stop()
		}
	}
	return nil
}

// adopt replaces the last pool by an equal one, whose devices are also the library's.
func (p *publisher) adopt(equal *resourceslice.Pool) {
	for _, pool := range []**resourceslice.Pool{&p.wanted, &p.lastBeside} {
		if *pool == p.last {
			*pool = equal
		}
	}
	p.last = equal
}

// refreshPublisher updates the publisher with the present state of the driver.
func (d *Driver) refreshPublisher(p *publisher) []discovery.Problem {
	if d.featuresDoubted.Swap(false) {
		p.nextDetection = time.Time{}
	}
	if at := d.writeFailed.Swap(nil); at != nil && p.firstFailure.IsZero() {
		p.firstFailure = *at
	}
	if r := d.registration.Load(); r.answer == Accepted {
		p.lastRegistration = r.answerTime
	}
	if written := d.lastPool.Load(); written != nil {
		p.adopt(written)
	}
	v, now := d.view.Load(), time.Now()
	if v.snapshot == nil {
		return nil
	}
	in, changes := d.poolInput(v, ptr.Deref(p.last, resourceslice.Pool{}), now)
	p.nextChange = changes
	if p.wanted != nil && p.lastBeside == p.last && sameInput(p.wantedInput, in) {
		return p.problems
	}
	wanted, problems := pool.BuildPool(in)
	in.Last = resourceslice.Pool{} // lastBeside stands for it, and the memory can be freed
	p.wanted, p.problems, p.wantedInput, p.lastBeside = &wanted, problems, in, p.last
	if !p.isUnpublished() {
		p.wanted = p.last // the same pointer makes later comparisons fast
	}
	return problems
}

// sameInput reports whether two inputs make the same pool, if the last published pool is the same.
func sameInput(a, b pool.Input) bool {
	return a.Snapshot == b.Snapshot && maps.Equal(a.Withheld, b.Withheld) && slices.Equal(a.Claims, b.Claims) &&
		a.Features == b.Features && maps.Equal(a.ExcusedHealth, b.ExcusedHealth) && a.GoneEffect == b.GoneEffect
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

// poolInput returns the input of the pool for a view. The second result is when the input changes
// without an event, or zero.
func (d *Driver) poolInput(v *view, last resourceslice.Pool, now time.Time) (in pool.Input, changes time.Time) {
	in = pool.Input{
		Snapshot:      v.snapshot,
		Withheld:      v.withheld,
		Claims:        d.ledger.Claims(),
		Last:          last,
		Features:      d.keptFeatures(),
		ExcusedHealth: make(map[string]bool),
		GoneEffect:    d.config.GoneEffect(),
	}
	for _, device := range v.snapshot.Devices {
		if device.Health.Status != discovery.Unknown {
			continue
		}
		if left := d.jobs.excuseFor(device.Name, now); left > 0 {
			in.ExcusedHealth[device.Name] = true
			changes = earlierOf(changes, now.Add(left))
		}
	}
	return in, changes
}

// PublishedPool returns the number of ResourceSlices and devices in the last pool given to the
// library. It reports false before the first publication.
func (d *Driver) PublishedPool() (slices, devices int, known bool) {
	last := d.lastPool.Load()
	if last == nil {
		return 0, 0, false
	}
	for i := range last.Slices {
		devices += len(last.Slices[i].Devices)
	}
	return len(last.Slices), devices, true
}

// keptFeatures returns the known features of the API server.
func (d *Driver) keptFeatures() features.Set { return ptr.Deref(d.features.Load(), features.Set{}) }

// notify sends a value to a channel with a buffer of one, unless the buffer is full.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
