package agent

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
)

// listen receives the kernel's events and forwards them to a.events. It sets a.hearing while
// Uevents delivers.
func (a *agent) listen(ctx context.Context) {
	heard, ended := make(chan scan.Changes, 1), make(chan struct{})
	relayed := make(chan struct{})
	go func() {
		defer close(relayed)
		for {
			select {
			case changes := <-heard:
				a.eventsArrive.Store(true)
				changes.Send(a.events)
			case <-ended:
				a.eventsArrive.Store(false)
				return
			}
		}
	}()
	err := a.Uevents(ctx, heard)
	close(ended)
	<-relayed
	if err != nil {
		klog.FromContext(ctx).Error(err, "Kernel events cannot be received; changes are found by the next scan", "interval", a.RescanInterval)
	}
}

// requestScan begins a scan that reads all families.
func (a *agent) requestScan() { scan.Changes{Everything: true}.Send(a.events) }

// firstWord is the time that the first scan waits for informants, so that a new agent does not
// withdraw facts that the previous agent published.
const firstWord = 30 * time.Second

// watchHost scans the host and sends the snapshots, with the settled states of devices, to
// a.snapshots.
func (a *agent) watchHost(ctx context.Context) {
	for _, informant := range a.Informants {
		waitFor(ctx, informant.Ready(), firstWord)
	}
	watch := scan.Watch{Host: a.host, Families: a.Families, Interval: a.RescanInterval, Events: a.events, Observe: a.metrics.ObserveScan}
	if a.AllEvents {
		watch.EventsArrive = a.eventsArrive.Load
	}
	var last *discovery.Snapshot
	settling := newSettling(ctx, a.Settings.Severity, a.files(), a.StateDir, a.requestScan)
	defer settling.stop()
	settling.settler.IsHeld = a.isHeld
	begun := time.Now()
	a.firstScanStarted.Store(&begun)
	watch.Run(ctx, func(s *discovery.Snapshot) {
		settling.settler.Severity = a.settings.Load().Severity
		s = a.reclaim.DescribeDevices(settling.settleStates(ctx, a.sharingDaemons.DescribeDevices(a.describeUsedDisks(a.passthrough.DescribeDevices(a.onDemand.DescribeDevices(s))))), settling.settler.Severity)
		if discovery.SameSnapshots(last, s) {
			return
		}
		last = s
		klog.FromContext(ctx).V(2).Info("The host's devices changed", "devices", len(s.Devices), "problems", len(s.Problems))
		if len(s.Devices) == 0 {
			klog.FromContext(ctx).Info("This host has no accelerators at present; one that appears is offered")
		}
		a.settledSnapshot.Store(s)
		notify(a.settledChanged)
		replace(a.snapshots, s)
	})
}

// isHeld reports whether a claim or a pod has the device.
func (a *agent) isHeld(device string) bool {
	return a.ledger.View(nil).Has(device)
}
