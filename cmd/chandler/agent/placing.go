package agent

import (
	"context"
	"sync/atomic"
	"time"

	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
)

// Intervals at which the agent looks again though no device has changed: until
// both sides are ready, while something waits, and otherwise.
const (
	readyInterval    = 50 * time.Millisecond
	waitingInterval  = time.Second // doubled until it is the next
	longWaitInterval = 10 * time.Second
	quietInterval    = 30 * time.Second
)

// publisher is a side of the agent: packages driver and legacy.
type publisher interface {
	Publish(*discovery.Snapshot)
}

// classic is the side of the device-plugin API: package legacy.
type classic interface {
	publisher

	// Know says what devices there are, whichever API offers them, with their
	// classic IDs: containers may hold some that another plugin handed out.
	Know(*discovery.Snapshot)
}

// placing hands each device to the API that is to offer it.
type placing struct {
	rules   *discovery.Rules
	auto    *auto
	sides   *sides
	fitter  *fitter
	dra     publisher
	classic classic

	// ready reports whether both sides know what is held.
	ready func() bool

	snapshots chan *discovery.Snapshot // the newest that the watch has seen; room for one
	problems  map[string]bool          // that were logged and persist
}

// place hands devices to the two APIs, once this is the active instance.
func (a *agent) place(ctx context.Context) {
	if !a.waitActive(ctx) {
		return
	}
	claimed := nodeClaims{client: draclient.New(a.Client), node: a.NodeName}
	served := func(ctx context.Context) (bool, error) { return servesDRA(ctx, a.Groups) }
	p := &placing{
		rules:     a.Settings.Rules,
		auto:      newAuto(ctx, served, a.driver.Registration, a.StateDir),
		sides:     newSides(ctx, draHolder{a}, a.classic, claimed, a.StateDir),
		fitter:    newFitter(discovery.Configurers(a.host, a.Families), discovery.Acceptors(a.Families), draHolder{a}, a.classic),
		dra:       noting{a.driver, &a.offered},
		classic:   a.classic,
		ready:     a.ready,
		snapshots: a.snapshots,
	}
	p.run(ctx)
}

// noting is a publisher that notes what it published last.
type noting struct {
	publisher
	last *atomic.Pointer[discovery.Snapshot]
}

// Publish implements publisher.
func (n noting) Publish(s *discovery.Snapshot) {
	n.last.Store(s)
	n.publisher.Publish(s)
}

// run publishes until the context ends. It looks again when a device changes,
// and now and then, since who holds what and what the cluster can do change
// besides.
func (p *placing) run(ctx context.Context) {
	var snapshot *discovery.Snapshot
	timer := time.NewTimer(readyInterval)
	defer timer.Stop()
	defer p.fitter.wait()
	wait := waitingInterval
	for {
		select {
		case <-ctx.Done():
			return
		case raw := <-p.snapshots:
			p.classic.Know(raw)
			snapshot = p.rules.Apply(raw) //nolint:contextcheck // evaluating an expression does not block
			p.report(ctx, snapshot.Problems)
		case <-p.fitter.ended:
		case <-timer.C:
		}
		if snapshot == nil || !p.ready() {
			timer.Reset(readyInterval)
			continue
		}
		mode := p.auto.choose(ctx)
		dra, classic, waiting := p.sides.split(ctx, snapshot, mode)
		p.dra.Publish(dra)
		classic, fitting := p.fitter.fit(ctx, classic)
		p.classic.Publish(classic)
		if waiting || fitting || mode == discovery.ModeAuto {
			timer.Reset(wait)
			wait = min(2*wait, longWaitInterval) // what is held may be held for days
		} else {
			timer.Reset(quietInterval)
			wait = waitingInterval
		}
	}
}

// report logs problems that were not there at the last snapshot.
func (p *placing) report(ctx context.Context, problems []discovery.Problem) {
	now := make(map[string]bool, len(problems))
	for _, problem := range problems {
		text := problem.Error()
		if !p.problems[text] && !now[text] {
			klog.FromContext(ctx).Info("Discovery problem", "device", problem.Device, "error", problem.Err)
		}
		now[text] = true
	}
	p.problems = now
}
