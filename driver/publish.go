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
	"chandler.dev/driver/pool"
	"chandler.dev/internal/ledger"
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
	var last *resourceslice.Pool
	confirmed := false // what the server keeps was asked for what is to be published
	var repeat <-chan time.Time
	pause := time.Second
	for {
		v := d.view.Load()
		var again <-chan time.Time
		if v.snapshot != nil {
			in, wait := d.input(v, ptr.Deref(last, resourceslice.Pool{}), time.Now())
			now, problems := pool.Of(in)
			if last != nil && !confirmed && pool.CompeteAnew(*last, now) {
				// A server that has begun to drop counters keeps those that it has.
				_ = d.reach(ctx) // what it does not say was logged
				confirmed = true
				continue
			}
			confirmed = false
			if last == nil || !equality.Semantic.DeepEqual(*last, now) {
				for _, problem := range problems {
					klog.FromContext(ctx).Error(problem.Err, "A device is left out of the ResourceSlices", "device", problem.Device)
				}
				if err := d.publish(ctx, helper, now); err != nil {
					return err
				}
				if ctx.Err() != nil {
					return nil
				}
				last = &now
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
				if err := d.publish(ctx, helper, *last); err != nil {
					return err
				}
			}
			if pause *= 2; pause <= lastRepeat {
				repeat = time.After(pause)
			}
		}
	}
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

// input returns what decides what is to be published of a view, and after which
// time that changes by itself, zero if it does not.
func (d *Driver) input(v *view, last resourceslice.Pool, now time.Time) (in pool.Input, wait time.Duration) {
	in = pool.Input{
		Snapshot: v.snapshot,
		Withheld: v.withheld,
		Last:     last,
		Features: *d.features.Load(),
		Excused:  make(map[string]bool),
		Gone:     d.config.Gone(),
	}
	for _, device := range v.snapshot.Devices {
		if device.Health.Status != discovery.Unknown {
			continue
		}
		if left := d.jobs.excuse(device.Name, now); left > 0 {
			in.Excused[device.Name] = true
			if wait == 0 || left < wait {
				wait = left
			}
		}
	}
	for _, r := range d.ledger.Claims() {
		for _, result := range r.Results {
			in.Holds = append(in.Holds, poolHold(&result))
		}
	}
	return in, wait
}

// poolHold returns what the pool is to know of a result.
func poolHold(r *ledger.Result) pool.Hold {
	return pool.Hold{
		Name: r.Device, Device: r.Source, Silicon: r.Silicon, Whole: r.Whole, Takes: r.Takes,
		Shared: r.Admin || r.Shared || r.Consumes != nil,
	}
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
