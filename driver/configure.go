package driver

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
)

// work makes one device what a claim wants of it.
type work struct {
	device string // the name in the snapshot
	do     discovery.Work
}

// works returns what is to be done before the devices are as the claim, whose key is the
// consumer, wants them. It takes over how they are described now, which may differ from the
// snapshot.
func (d *Driver) works(consumer string, results []ledger.Result, devices []rules.Offered, parameters map[string]discovery.Parameters) ([]work, error) {
	var works []work
	for i := range results {
		r := &results[i]
		now, do, err := d.config.Configure(devices[i].Device, parameters[r.Request], consumer)
		if r.Admin && (do != nil || err != nil) {
			addNothing(r, &devices[i].Device)
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("request %s: %w", r.Request, err)
		}
		if do != nil && (r.Shared || r.Consumes != nil) {
			return nil, fmt.Errorf("request %s: device %s would have to be changed and is not the claim's alone", r.Request, r.Device)
		}
		if do != nil {
			works = append(works, work{r.Source, do})
		}
		devices[i].Device, r.Identity, r.Driver = now, now.Identity, now.Attributes.String("driver")
	}
	return works, nil
}

// addNothing removes from a result with admin access what a container would get of its device. A monitor is allocated
// all devices, among them those that do not exist yet, and those that a virtual machine has under vfio: it has nothing
// to observe there, and the devices stay as they are.
func addNothing(r *ledger.Result, d *discovery.Device) {
	d.Family, d.Edits, d.SharedEdits, d.CommonNodes, d.Files, r.Files = "", specs.ContainerEdits{}, specs.ContainerEdits{}, nil, nil, nil
}

// configure does the works of a plan, and returns the plan that is then to be
// followed. It is on record before they begin: after a crash the claim holds
// the devices still, and its next call goes on.
func (d *Driver) configure(ctx context.Context, claim *resourceapi.ResourceClaim, first *plan) (*plan, error) {
	if !first.kept() { // else containers may have the devices, and the claim keeps its record
		if err := d.ledger.Give(first.wanted, ledger.Configuring, first.view); err != nil {
			return nil, err
		}
	}
	d.jobs.start(ctx, first)
	if err := d.join(ctx, claim.UID); err != nil {
		return nil, err
	}
	then, err := d.plan(ctx, claim)
	if err == nil && len(then.works) > 0 {
		err = fmt.Errorf("device %s: it was made what the claim wants, and something has changed it again", then.works[0].device)
	}
	return then, err
}

// join waits for the job of a claim, if there is one. One that failed leaves
// the claim with its devices, for the next call to go on. The caller keeps other
// calls for the claim away.
func (d *Driver) join(ctx context.Context, uid types.UID) error {
	j := d.jobs.of(uid)
	if j == nil {
		return nil
	}
	if err := d.await(ctx, j); err != nil {
		return err
	}
	d.jobs.forget(uid)
	return j.err
}

// callOff ends the job of a claim: what has not begun is not done, what has is
// waited for.
func (d *Driver) callOff(ctx context.Context, uid types.UID) error {
	j := d.jobs.of(uid)
	if j == nil {
		return nil
	}
	j.cancel()
	if err := d.await(ctx, j); err != nil {
		return err
	}
	d.jobs.forget(uid)
	return nil
}

// await returns once the job has ended, or with the context.
func (d *Driver) await(ctx context.Context, j *job) error {
	if closed(j.done) {
		return nil
	}
	select {
	case <-j.done:
		return nil
	case <-ctx.Done():
	case <-d.calls.stopping:
		return errStopping
	}
	return fmt.Errorf("still configuring %s, for %s now; it goes on, and the next call waits for it too",
		strings.Join(j.devices, ", "), time.Since(j.began).Round(time.Second))
}

// job makes the devices of a claim what it wants of them.
type job struct {
	devices []string
	began   time.Time
	cancel  context.CancelFunc
	done    chan struct{} // closed when err is set
	err     error
}

// jobs are those of claims whose outcome nobody has been told of, one for each
// claim at most. They outlive the calls that begin them.
type jobs struct {
	rescan func() // called when a job has ended
	group  sync.WaitGroup

	mu    sync.Mutex
	byUID map[types.UID]*job
	ended map[string]time.Time // by device, when the last one ended
}

// start begins the works of a plan.
func (s *jobs) start(ctx context.Context, p *plan) {
	working, cancel := context.WithCancel(context.WithoutCancel(ctx))
	j := &job{began: time.Now(), cancel: cancel, done: make(chan struct{})}
	for _, w := range p.works {
		j.devices = append(j.devices, w.device)
	}
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(p.wanted.Namespace, p.wanted.Name), "uid", p.wanted.UID, "devices", j.devices)
	logger.Info("Configuring devices for a claim")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byUID == nil {
		s.byUID, s.ended = make(map[types.UID]*job), make(map[string]time.Time)
	}
	s.byUID[p.wanted.UID] = j
	s.group.Go(func() {
		defer cancel()
		j.err = workAll(working, p.works)
		if j.err != nil {
			logger.Error(j.err, "Devices were not configured for a claim", "took", time.Since(j.began))
		} else {
			logger.Info("Configured devices for a claim", "took", time.Since(j.began))
		}
		s.end(j)
		s.rescan()
	})
}

// workAll does one work after the other, since they may be on one card. A panic
// is a defect of ours, but must not take the process with it.
func workAll(ctx context.Context, works []work) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			klog.FromContext(ctx).Error(nil, "Configuring devices panicked", "panic", cause, "stack", string(debug.Stack()))
			err = fmt.Errorf("configure devices: panic: %v", cause)
		}
	}()
	for _, w := range works {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("device %s: called off: %w", w.device, err)
		}
		if err := w.do(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s *jobs) end(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, device := range j.devices {
		s.ended[device] = time.Now()
	}
	close(j.done)
}

// of returns the job of a claim, nil if there is none.
func (s *jobs) of(uid types.UID) *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byUID[uid]
}

// forget says that the outcome of a claim's job is known to those whom it
// concerns.
func (s *jobs) forget(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byUID, uid)
}

// stop calls all jobs off and returns when they have ended.
func (s *jobs) stop() {
	s.mu.Lock()
	for _, j := range s.byUID {
		j.cancel()
	}
	s.mu.Unlock()
	s.group.Wait()
}

// readAgain is how long after a job a device may still be Unknown because of it:
// it is to be scanned, and read for a while.
const readAgain = 30 * time.Second

// excuse returns for how long it is not said of a device that it is Unknown:
// while a job is at it, which is why it cannot be read.
func (s *jobs) excuse(device string, now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, j := range s.byUID {
		if slices.Contains(j.devices, device) && !closed(j.done) {
			return readAgain
		}
	}
	return max(0, readAgain-now.Sub(s.ended[device]))
}

// said returns what is said of a device's health.
func (s *jobs) said(device *discovery.Device, now time.Time) discovery.Health {
	if device.Health.Status == discovery.Unknown && s.excuse(device.Name, now) > 0 {
		return discovery.Health{Status: discovery.Healthy}
	}
	return device.Health
}
