package main

import (
	"context"
	"time"

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

// agent hands each device to the API that is to offer it.
type agent struct {
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

// run publishes until the context ends. It looks again when a device changes,
// and now and then, since who holds what and what the cluster can do change
// besides.
func (a *agent) run(ctx context.Context) error {
	var snapshot *discovery.Snapshot
	timer := time.NewTimer(readyInterval)
	defer timer.Stop()
	defer a.fitter.wait()
	wait := waitingInterval
	for {
		select {
		case <-ctx.Done():
			return nil
		case raw := <-a.snapshots:
			a.classic.Know(raw)
			snapshot = a.rules.Apply(raw) //nolint:contextcheck // evaluating an expression does not block
			a.report(ctx, snapshot.Problems)
		case <-a.fitter.ended:
		case <-timer.C:
		}
		if snapshot == nil || !a.ready() {
			timer.Reset(readyInterval)
			continue
		}
		mode := a.auto.choose(ctx)
		dra, classic, waiting := a.sides.split(ctx, snapshot, mode)
		a.dra.Publish(dra)
		classic, fitting := a.fitter.fit(ctx, classic)
		a.classic.Publish(classic)
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
func (a *agent) report(ctx context.Context, problems []discovery.Problem) {
	now := make(map[string]bool, len(problems))
	for _, problem := range problems {
		text := problem.Error()
		if !a.problems[text] && !now[text] {
			klog.FromContext(ctx).Info("Discovery problem", "device", problem.Device, "error", problem.Err)
		}
		now[text] = true
	}
	a.problems = now
}
