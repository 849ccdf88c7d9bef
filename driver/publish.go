package driver

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
)

// sayAfter is how often it is said that the API server does not answer.
const sayAfter = 30 * time.Second

// lastRepeat is how long after a registration what is published is said for the
// last time again. A kubelet that starts deletes all slices of its node, and so
// does one from which a driver was cut off for 30 s (pkg/kubelet/cm/dra/plugin/
// dra_plugin_manager.go); the library would make them anew 30 s later
// (resourceslice.DefaultSyncDelay). To say it again writes nothing that is there.
const lastRepeat = 8 * time.Second

// publishLoop publishes until the context ends: when there is a new snapshot,
// when a claim lets go of a device, when a device has long been configured
// that cannot be read, when the server turns out to drop fields, and when the
// kubelet has registered the driver.
func (d *Driver) publishLoop(ctx context.Context, helper Helper) error {
	var last *resourceslice.DriverResources
	confirmed := false // what the server keeps was asked for what is to be published
	var repeat <-chan time.Time
	pause := time.Second
	for {
		v := d.view.Load()
		var again <-chan time.Time
		if v.snapshot != nil {
			offer, wait := d.offer(v, last, time.Now())
			resources, problems := offer.driverResources()
			if last != nil && !confirmed && competeAnew(*last, resources) {
				// A server that has begun to drop counters keeps those that it has.
				_ = d.reach(ctx) // what it does not say was logged
				confirmed = true
				continue
			}
			confirmed = false
			if last == nil || !equality.Semantic.DeepEqual(*last, resources) {
				for _, problem := range problems {
					klog.FromContext(ctx).Error(problem.Err, "A device is left out of the ResourceSlices", "device", problem.Device)
				}
				if err := publish(ctx, helper, resources); err != nil {
					return err
				}
				if ctx.Err() != nil {
					return nil
				}
				last = &resources
			}
			if wait > 0 {
				again = time.After(wait)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-v.next:
		case <-d.wake:
		case <-again:
		case <-d.registered:
			pause = time.Second
			repeat = time.After(pause)
		case <-repeat:
			if last != nil {
				if err := publish(ctx, helper, *last); err != nil {
					return err
				}
			}
			if pause *= 2; pause <= lastRepeat {
				repeat = time.After(pause)
			}
		}
	}
}

// competeAnew reports whether there are devices that take of counters and did not
// before. A server that drops counters would let them be given out beside each
// other, until it is seen that it does.
func competeAnew(before, after resourceslice.DriverResources) bool {
	known := remember(before).devices
	for name, device := range remember(after).devices {
		if consumes(device) && !consumes(known[name]) {
			return true
		}
	}
	return false
}

// publish publishes. The first time the helper waits until the API server has
// listed what slices there are, whatever becomes of the context; that must not
// keep the driver from ending. It returns when its own context ends, which it
// does right after this one.
func publish(ctx context.Context, helper Helper, resources resourceslice.DriverResources) error {
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

// offer returns what is to be published of a view, and after which time that
// changes by itself, zero if it does not.
func (d *Driver) offer(v *view, last *resourceslice.DriverResources, now time.Time) (o *offer, wait time.Duration) {
	o = &offer{
		pool:     d.config.NodeName,
		snapshot: v.snapshot,
		excused:  make(map[string]bool),
		held:     make(map[string]string),
		taken:    make(map[string]holding),
		gone:     d.config.Gone,
		without:  *d.without.Load(),
	}
	if last != nil {
		o.last = remember(*last)
	}
	for _, device := range v.snapshot.Devices {
		if device.Health.Status != discovery.Unknown {
			continue
		}
		if left := d.jobs.excuse(device.Name, now); left > 0 {
			o.excused[device.Name] = true
			if wait == 0 || left < wait {
				wait = left
			}
		}
	}
	for _, r := range d.store.prepared() {
		for _, result := range r.Results {
			o.held[result.Device] = result.Source
			if !result.Admin && !result.Shared && result.Consumes == nil {
				o.taken[result.Device] = holding{result.Silicon, result.Whole, result.Takes}
			}
		}
	}
	return o, wait
}

// wakePublisher makes the publisher look again.
func (d *Driver) wakePublisher() { notify(d.wake) }

// notify puts a value into a channel with room for one, unless one waits in it.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
