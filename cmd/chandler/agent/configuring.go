package agent

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
)

// workInterval is how long the agent waits after work on a device failed, before it
// tries again.
const workInterval = 5 * time.Minute

// configuring configures devices for the device-plugin API. For example, it programs an
// FPGA with the function that the configuration wants. A device that is not as wanted
// is not listed. Work on the device begins when the kubelet has been told so and nobody
// has the silicon, and nobody gets the silicon before the work has ended. In DRA a claim
// says what it wants.
type configuring struct {
	configure discovery.Configurer
	accept    discovery.Acceptor
	ledger    *ledger.Ledger
	ended     chan struct{} // some work has ended; room for one

	wanted  map[string]bool   // devices that were as wanted at the last look
	reasons map[string]string // why the other devices are not listed

	group   sync.WaitGroup
	mu      sync.Mutex
	working map[string]bool // devices
	failed  map[string]failure
}

// failure is why a device could not be configured.
type failure struct {
	err error
	at  time.Time
}

func newConfiguring(configure discovery.Configurer, accept discovery.Acceptor, l *ledger.Ledger) *configuring {
	return &configuring{
		configure: configure, accept: accept, ledger: l, ended: make(chan struct{}, 1),
		working: make(map[string]bool), failed: make(map[string]failure),
	}
}

// listable returns the devices that can be listed, and whether to look again soon. The
// stock is what the host has. Nothing is made of silicon that is withheld.
func (f *configuring) listable(ctx context.Context, s *rules.Snapshot, stock ledger.Stock, withheld map[string]string) (listed *rules.Snapshot, soon bool) {
	listed = new(*s)
	listed.Devices = slices.Clone(s.Devices)
	wanted, reasons, crowded := make(map[string]bool), make(map[string]string), crowded(listed.Devices)
	for i := range listed.Devices {
		d := &listed.Devices[i]
		if len(d.Want) == 0 && (d.Rebind == nil && d.Making == nil || len(d.Offers) == 0) {
			continue // nothing is wanted of it, it is there, and nothing can have been made of it
		}
		if withheld[d.Silicon()] != "" {
			wanted[d.Name] = f.wanted[d.Name]
			if reason := f.reasons[d.Name]; reason != "" {
				reasons[d.Name] = reason
			}
			continue
		}
		reason, again := noRoom, false
		if !crowded[d.Name] {
			reason, again = f.look(ctx, d, stock)
		}
		wanted[d.Name] = reason == ""
		if reason == "" {
			continue
		}
		reasons[d.Name], soon = reason, soon || again
		if reason != f.reasons[d.Name] {
			klog.FromContext(ctx).Info("A device is not listed while it is not what the configuration wants", "device", d.Name, "reason", reason)
		}
	}
	f.wanted, f.reasons = wanted, reasons
	listed.Devices = withdraw(listed.Devices, reasons)
	return listed, soon
}

// noRoom is why a device is not listed that could be made, and is not: see [crowded].
const noRoom = "there is no room to make it beside others that the configuration wants too"

// look returns why the device cannot be listed, or "" if it can, and whether that may
// change by itself. It updates the description of the device, and begins work on the
// device if that is due.
func (f *configuring) look(ctx context.Context, d *rules.Offered, stock ledger.Stock) (reason string, again bool) {
	const begun = "it is being made so"
	working, failed := f.state(d.Name)
	if working {
		return begun, false
	}
	if err := f.accept([]discovery.Device{d.Device}, d.Want); err != nil {
		return err.Error(), false
	}
	change := changeOf(d)
	now, work, err := f.configure(d.Device, d.Want, change.Key())
	switch {
	case err != nil && (d.Health.Stale || d.Health.Status == discovery.Unknown) && f.wanted[d.Name]:
		return "", false // it was as wanted, and cannot be read for the moment
	case err != nil:
		return err.Error(), false
	case work == nil:
		d.Device = now
		return "", false
	case failed.err != nil && time.Since(failed.at) < workInterval:
		return failed.err.Error(), false
	case f.reasons[d.Name] == "":
		return "it is to be made so", true // the kubelet is told before work begins
	}
	lease, blocked := f.ledger.Lease(change, stock)
	if blocked != nil {
		return fmt.Sprintf("it is to be made so once it is free of %s", blocked.Why()), true
	}
	f.start(ctx, d.Name, work, lease.Release)
	return begun, false
}

// changeOf returns what is reserved while a device changes: the whole silicon, but a driver is that of one function,
// or of one IOMMU group, and a device that is created takes its part.
func changeOf(d *rules.Offered) ledger.Change {
	c := ledger.Change{Name: d.Name + " for its resource", API: discovery.ModeDevicePlugin, Devices: []ledger.Hold{ledger.Silicon(d.Silicon())}}
	if d.Want[discovery.Driver] != "" || d.Making != nil {
		c.Devices = []ledger.Hold{ledger.Device(d.Name, d.Silicon())}
	}
	return c
}

func (f *configuring) state(device string) (working bool, failed failure) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.working[device], f.failed[device]
}

// start begins the work on a device, which is released when the work has ended.
func (f *configuring) start(ctx context.Context, device string, work discovery.Work, release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.working[device] = true
	f.group.Go(func() {
		err := workSafely(ctx, work)
		release()
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.working, device)
		f.failed[device] = failure{err, time.Now()}
		select {
		case f.ended <- struct{}{}:
		default:
		}
	})
}

// workSafely does some work. A panic in it becomes an error and does not end the
// process.
func workSafely(ctx context.Context, work discovery.Work) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			klog.FromContext(ctx).Error(nil, "Work on a device panicked", "panic", cause, "stack", string(debug.Stack()))
			err = fmt.Errorf("panic: %v", cause)
		}
	}()
	return work(ctx)
}

// wait returns when all work has ended.
func (f *configuring) wait() { f.group.Wait() }

// withdraw takes back the offers of devices that have a reason not to be listed, and of
// devices that are only handed out together with one of those.
func withdraw(devices []rules.Offered, reasons map[string]string) []rules.Offered {
	type unit struct{ resource, name string }
	broken := make(map[unit]bool)
	for i := range devices {
		if reasons[devices[i].Name] == "" {
			continue
		}
		for _, offer := range devices[i].Offers {
			broken[unit{offer.Resource, offer.Unit}] = offer.Unit != ""
		}
		devices[i].Offers = nil
	}
	for i := range devices {
		devices[i].Offers = slices.DeleteFunc(slices.Clone(devices[i].Offers), func(offer discovery.Offer) bool {
			return broken[unit{offer.Resource, offer.Unit}]
		})
	}
	return devices
}
