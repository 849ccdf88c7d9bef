package agent

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
)

// hostWatch scans the devices of the host.
type hostWatch struct {
	config   *Config
	host     *discovery.Host
	observe  func(scan.Result)        // receives the result of each scan
	settings func() *Settings         // in force
	isHeld   func(device string) bool // whether a claim or a pod has the device

	// describe shows devices in change as their consumers see them. withhold shows settled devices
	// that no new consumer can have.
	describe func(*discovery.Snapshot) *discovery.Snapshot
	withhold func(*discovery.Snapshot, discovery.Severity) *discovery.Snapshot

	events       chan scan.Changes                  // changes of the host's devices since the last scan
	eventsArrive atomic.Bool                        // the kernel's events reach the channel events
	firstStarted atomic.Pointer[time.Time]          // start of the first scan
	settled      atomic.Pointer[discovery.Snapshot] // the devices with their settled states, nil before the first scan

	settledChanged chan struct{}            // has a value when settled changed
	snapshots      chan *discovery.Snapshot // has a snapshot that was not placed yet
}

func newHostWatch(config *Config, host *discovery.Host) *hostWatch {
	return &hostWatch{
		config: config, host: host, events: make(chan scan.Changes, 1), settledChanged: make(chan struct{}, 1),
		snapshots: make(chan *discovery.Snapshot, 1),
	}
}

// listen receives the kernel's events and forwards them to events. It sets eventsArrive while
// Uevents delivers.
func (w *hostWatch) listen(ctx context.Context) {
	heard, ended := make(chan scan.Changes, 1), make(chan struct{})
	relayed := make(chan struct{})
	go func() {
		defer close(relayed)
		for {
			select {
			case changes := <-heard:
				w.eventsArrive.Store(true)
				changes.Send(w.events)
			case <-ended:
				w.eventsArrive.Store(false)
				return
			}
		}
	}()
	err := w.config.Uevents(ctx, heard)
	close(ended)
	<-relayed
	if err != nil {
		klog.FromContext(ctx).Error(err, "Kernel events cannot be received; changes are found by the next scan", "interval", w.config.RescanInterval)
	}
}

// requestScan begins a scan that reads all families.
func (w *hostWatch) requestScan() { scan.Changes{Everything: true}.Send(w.events) }

// firstWord is the time that the first scan waits for informants, so that a new agent does not
// withdraw facts that the previous agent published.
const firstWord = 30 * time.Second

// run scans the host until the context ends, and sends the snapshots, with the settled states of
// devices, to snapshots.
func (w *hostWatch) run(ctx context.Context) {
	for _, informant := range w.config.Informants {
		waitFor(ctx, informant.Ready(), firstWord)
	}
	watch := scan.Watch{Host: w.host, Families: w.config.Families, Interval: w.config.RescanInterval, Events: w.events, Observe: w.observe}
	if w.config.AllEvents {
		watch.EventsArrive = w.eventsArrive.Load
	}
	var last *discovery.Snapshot
	settling := newSettling(ctx, w.config.Settings.Severity, w.config.files(), w.config.StateDir, w.requestScan)
	defer settling.stop()
	settling.settler.IsHeld = w.isHeld
	begun := time.Now()
	w.firstStarted.Store(&begun)
	watch.Run(ctx, func(s *discovery.Snapshot) {
		settling.settler.Severity = w.settings().Severity
		s = w.withhold(settling.settleStates(ctx, w.describe(s)), settling.settler.Severity)
		if discovery.SameSnapshots(last, s) {
			return
		}
		last = s
		klog.FromContext(ctx).V(2).Info("The host's devices changed", "devices", len(s.Devices), "problems", len(s.Problems))
		if len(s.Devices) == 0 {
			klog.FromContext(ctx).Info("This host has no accelerators at present; one that appears is offered")
		}
		w.settled.Store(s)
		notify(w.settledChanged)
		replace(w.snapshots, s)
	})
}

// readPatience is how long the first successful scan may take before the agent is unready.
const readPatience = time.Minute

// checkRead returns an error if no scan has succeeded within readPatience after scanning began.
func (w *hostWatch) checkRead(now time.Time) error {
	begun := w.firstStarted.Load()
	if begun == nil || w.settled.Load() != nil || now.Sub(*begun) <= readPatience {
		return nil
	}
	return fmt.Errorf("nothing of the host could be read since %s", begun.Format(time.RFC3339))
}
