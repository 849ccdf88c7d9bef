package placement

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
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// WorkInterval is the pause between failed work on a device and the next attempt.
const WorkInterval = 5 * time.Minute

// configurator configures devices for the device plugin API. For example, it programs an FPGA with
// the function that the configuration requests. A device is not listed before its state matches the
// configuration. Work on a device begins only after the kubelet was informed and while the physical
// device is free, and the physical device cannot be allocated until the work has ended. By DRA,
// claims contain the parameters, and preparing a claim configures its devices.
type configurator struct {
	configure discovery.Configurer
	accept    discovery.Acceptor
	ledger    *ledger.Ledger
	workEnded chan struct{} // receives a value when work has ended; capacity 1

	wantedDevices map[string]bool   // whether the device matched the configuration at the last check, by device
	reasons       map[string]string // why the device is not listed, by device

	group      sync.WaitGroup
	mu         sync.Mutex
	inProgress map[string]bool // by device
	failures   map[string]failure
}

// failure is the error of the last work on a device, nil if the work succeeded, and when it ended.
type failure struct {
	err error
	at  time.Time
}

func newConfiguring(configure discovery.Configurer, accept discovery.Acceptor, l *ledger.Ledger) *configurator {
	return &configurator{
		configure: configure, accept: accept, ledger: l, workEnded: make(chan struct{}, 1),
		inProgress: make(map[string]bool), failures: make(map[string]failure),
	}
}

// listableDevices returns the snapshot with the offers that can be listed, and whether to check
// again soon. The stock is the present state of the host. Devices on withheld physical devices keep
// their last result, and no work on them begins.
func (f *configurator) listableDevices(ctx context.Context, s *rules.Snapshot, stock exclusion.Stock, withheld map[string]string) (listed *rules.Snapshot, soon bool) {
	listed = new(*s)
	listed.Devices = slices.Clone(s.Devices)
	wanted, reasons, crowded := make(map[string]bool), make(map[string]string), crowdedDevices(listed.Devices)
	for i := range listed.Devices {
		d := &listed.Devices[i]
		if len(d.Want) == 0 && (d.Passthrough == nil && d.Creation == nil || len(d.Offers) == 0) {
			continue // the device has no parameters, and is already usable or not offered
		}
		if withheld[d.Silicon()] != "" {
			wanted[d.Name] = f.wantedDevices[d.Name]
			if reason := f.reasons[d.Name]; reason != "" {
				reasons[d.Name] = reason
			}
			continue
		}
		reason, again := noRoom, false
		if !crowded[d.Name] {
			reason, again = f.configureDevice(ctx, d, stock)
		}
		wanted[d.Name] = reason == ""
		if reason == "" {
			continue
		}
		reasons[d.Name], soon = reason, soon || again
		if reason != f.reasons[d.Name] {
			klog.FromContext(ctx).Info("A device is not listed until it is configured as requested", "device", d.Name, "reason", reason)
		}
	}
	f.wantedDevices, f.reasons = wanted, reasons
	listed.Devices = withdrawOffers(listed.Devices, reasons)
	return listed, soon
}

// noRoom is the reason for a device that could be created but would not fit; see [crowdedDevices].
const noRoom = "there is no room for it beside other configured devices"

// configureDevice returns why the device cannot be listed, "" if the device can be, and whether to
// check again soon. It updates the description of the device, and starts the work that is due.
func (f *configurator) configureDevice(ctx context.Context, d *rules.Offered, stock exclusion.Stock) (reason string, again bool) {
	const begun = "it is being configured"
	working, failed := f.deviceState(d.Name)
	if working {
		return begun, false
	}
	if err := f.accept([]discovery.Device{d.Device}, d.Want); err != nil {
		return err.Error(), false
	}
	change := changeOf(d)
	now, work, err := f.configure(d.Device, d.Want, change.Key())
	switch {
	case err != nil && (d.Health.Stale || d.Health.Status == discovery.Unknown) && f.wantedDevices[d.Name]:
		return "", false // the device matched before, and is only unreadable at the moment
	case err != nil:
		return err.Error(), false
	case work == nil:
		d.Device = now
		return "", false
	case failed.err != nil && time.Since(failed.at) < WorkInterval:
		return failed.err.Error(), false
	case f.reasons[d.Name] == "":
		return "it is to be configured", true // the kubelet learns of the change before the work begins
	}
	lease, blocked := f.ledger.Leases.LeaseDevices(change, stock)
	if blocked != nil {
		return fmt.Sprintf("it is to be configured when it is no longer in use by %s", blocked.OwnerText), true
	}
	f.start(ctx, d.Name, work, lease.Release)
	return begun, false
}

// changeOf returns what is reserved while a device changes: the whole physical device in general,
// but only the device itself if its driver changes, since a driver belongs to one function or IOMMU
// group, or if the device is created, since a new device takes only its partition.
func changeOf(d *rules.Offered) allocation.Change {
	c := allocation.Change{Name: d.Name + " for its resource", API: discovery.ModeDevicePlugin, Devices: []allocation.Hold{allocation.SiliconHold(d.Silicon())}}
	if d.Want[discovery.Driver] != "" || d.Creation != nil {
		c.Devices = []allocation.Hold{allocation.DeviceHold(d.Name, d.Silicon())}
	}
	return c
}

func (f *configurator) deviceState(device string) (working bool, failed failure) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.inProgress[device], f.failures[device]
}

// start starts the work on a device. When the work has ended, start calls release and signals
// f.ended.
func (f *configurator) start(ctx context.Context, device string, work discovery.Work, release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inProgress[device] = true
	f.group.Go(func() {
		err := workSafely(ctx, work)
		release()
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.inProgress, device)
		f.failures[device] = failure{err, time.Now()}
		select {
		case f.workEnded <- struct{}{}:
		default:
		}
	})
}

// workSafely does the work and returns its error. A panic becomes an error instead of ending the
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
func (f *configurator) wait() { f.group.Wait() }

// withdrawOffers removes the offers of devices that have a reason not to be listed, and the offers
// of devices that are only allocated together with such a device.
func withdrawOffers(devices []rules.Offered, reasons map[string]string) []rules.Offered {
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
