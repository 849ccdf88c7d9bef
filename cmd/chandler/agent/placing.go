package agent

import (
	"context"
	"slices"
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

// classicPublisher is the side of the device-plugin API: package legacy.
type classicPublisher interface {
	publisher

	// Know says what devices there are, whichever API offers them, with their
	// classic IDs: containers may hold some that another plugin handed out.
	Know(*discovery.Snapshot)
}

// placing hands each device to the API that is to offer it.
type placing struct {
	rules   *discovery.Rules
	auto    *auto
	places  *placements
	view    View
	claims  nodeClaims
	fitter  *fitter
	dra     publisher
	classic classicPublisher
	placed  *atomic.Pointer[placed] // what was placed last

	// ready reports whether both sides know what is held.
	ready func() bool

	snapshots chan *discovery.Snapshot // the newest that the watch has seen; room for one
	moving    map[string]string        // what waits for its API, and why
	problems  map[string]bool          // that were logged and persist
}

// place hands devices to the two APIs, once this is the active instance.
func (a *agent) place(ctx context.Context) {
	if !a.waitActive(ctx) {
		return
	}
	served := func(ctx context.Context) (bool, error) { return servesDRA(ctx, a.Groups) }
	p := &placing{
		rules:     a.Settings.Rules,
		auto:      newAuto(ctx, served, a.driver.Registration, a.files(), a.StateDir),
		places:    loadPlacements(ctx, a.files(), a.StateDir),
		view:      holders{draHolder{a}, a.classic},
		claims:    nodeClaims{client: draclient.New(a.Client), node: a.NodeName},
		fitter:    newFitter(discovery.Configurers(a.host, a.Families), discovery.Acceptors(a.Families), draHolder{a}, a.classic),
		dra:       a.driver,
		placed:    &a.placed,
		classic:   a.classic,
		ready:     a.ready,
		snapshots: a.snapshots,
	}
	p.run(ctx)
}

// placed is a snapshot and where its devices are.
type placed struct {
	snapshot  *discovery.Snapshot
	placement Placement
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
		placement := p.decide(ctx, snapshot, mode)
		p.placed.Store(&placed{snapshot, placement})
		p.dra.Publish(withhold(snapshot, placement.OfDRA()))
		listed := &discovery.Snapshot{Devices: placement.Classic(snapshot.Devices), Gone: snapshot.Gone}
		listed, fitting := p.fitter.fit(ctx, listed)
		p.classic.Publish(withhold(listed, placement.Moving))
		if len(placement.Moving) > 0 || fitting || mode == discovery.ModeAuto {
			timer.Reset(wait)
			wait = min(2*wait, longWaitInterval) // what is held may be held for days
		} else {
			timer.Reset(quietInterval)
			wait = waitingInterval
		}
	}
}

// decide places the devices, and writes the placement down if it is new.
func (p *placing) decide(ctx context.Context, s *discovery.Snapshot, auto discovery.Mode) Placement {
	facts := Facts{Auto: auto}
	placement := Place(p.places.api, s.Devices, p.view, facts)
	if placement.Ask {
		facts.Published = p.claims.published(ctx, s)
		placement = Place(p.places.api, s.Devices, p.view, facts)
	}
	for silicon, reason := range placement.Moving {
		if p.moving[silicon] != reason {
			klog.FromContext(ctx).V(2).Info("Silicon waits for its API", "silicon", silicon, "reason", reason)
		}
	}
	for silicon, api := range placement.API {
		if p.places.api[silicon] != api {
			klog.FromContext(ctx).V(2).Info("Silicon is offered by another API", "silicon", silicon, "from", p.places.api[silicon], "to", api)
		}
	}
	p.moving = placement.Moving
	p.places.set(ctx, placement.API)
	return placement
}

// withhold returns a snapshot whose devices say why they are withheld.
func withhold(s *discovery.Snapshot, withheld map[string]string) *discovery.Snapshot {
	out := *s
	out.Devices = slices.Clone(s.Devices)
	for i := range out.Devices {
		out.Devices[i].Withheld = withheld[out.Devices[i].Silicon()]
	}
	return &out
}

// holder knows who holds a piece of silicon through one of the two APIs.
type holder interface {
	Holder(silicon string) (who string, held bool)
}

// holders are those of both APIs.
type holders struct{ dra, classic holder }

// Blocked implements [View].
func (h holders) Blocked(by discovery.Mode, silicon string) string {
	other := h.dra
	if by == discovery.ModeDRA {
		other = h.classic
	}
	who, held := other.Holder(silicon)
	if held && who == "" {
		return "somebody"
	}
	if !held {
		return ""
	}
	return who
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
