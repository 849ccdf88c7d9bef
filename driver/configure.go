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
	"chandler.dev/internal/ledger/allocation"
)

// work is the configuration of one device for a claim.
type work struct {
	device string // name in the snapshot
	do     discovery.Work
}

// planWork returns the work needed before the devices match the claim. The consumer is the claim's
// key. planWork also updates the devices and results with the present descriptions, which may
// differ from the snapshot.
func (h *claimHandler) planWork(consumer string, results []allocation.Result, devices []rules.Offered, parameters map[string]discovery.Parameters) ([]work, error) {
	var works []work
	for i := range results {
		r := &results[i]
		now, do, err := h.config.Configure(devices[i].Device, parameters[r.Request], consumer)
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

// addNothing removes from a result with admin access everything for a container. A monitoring claim
// has all devices, including those that do not exist yet and those under vfio in a virtual machine.
// There is nothing to observe on these devices, and they stay unchanged.
func addNothing(r *allocation.Result, d *discovery.Device) {
	d.Family, d.Edits, d.SharedEdits, d.CommonNodes, d.Files, r.Files = "", specs.ContainerEdits{}, specs.ContainerEdits{}, nil, nil, nil
}

// runPlan does the works of a plan, and returns the new plan to follow. The claim is recorded
// before the work begins: after a crash the claim still has the devices, and its next call
// continues.
func (h *claimHandler) runPlan(ctx context.Context, claim *resourceapi.ResourceClaim, first *plan) (*plan, error) {
	if !first.isKept() { // otherwise containers may have the devices, and the claim keeps its record
		if err := h.ledger.AllocateClaim(first.wanted, allocation.Configuring, first.view); err != nil {
			return nil, err
		}
	}
	h.jobs.start(ctx, first)
	if err := h.join(ctx, claim.UID); err != nil {
		return nil, err
	}
	then, err := h.planClaim(ctx, claim)
	if err == nil && len(then.works) > 0 {
		err = fmt.Errorf("device %s: it was configured for the claim, and has been changed again", then.works[0].device)
	}
	return then, err
}

// join waits for the job of a claim, if there is one. After a failed job the claim keeps its
// devices, and the next call tries again. The caller must hold the claim's lock.
func (h *claimHandler) join(ctx context.Context, uid types.UID) error {
	j := h.jobs.jobOf(uid)
	if j == nil {
		return nil
	}
	if err := h.awaitJob(ctx, j); err != nil {
		return err
	}
	h.jobs.removeJob(uid)
	return j.err
}

// callOff cancels the job of a claim. Works that have not begun are skipped, and callOff waits for
// the running one.
func (h *claimHandler) callOff(ctx context.Context, uid types.UID) error {
	j := h.jobs.jobOf(uid)
	if j == nil {
		return nil
	}
	j.cancel()
	if err := h.awaitJob(ctx, j); err != nil {
		return err
	}
	h.jobs.removeJob(uid)
	return nil
}

// awaitJob returns when the job has ended, or with an error when the context ends or the driver
// stops.
func (h *claimHandler) awaitJob(ctx context.Context, j *job) error {
	if isClosed(j.done) {
		return nil
	}
	select {
	case <-j.done:
		return nil
	case <-ctx.Done():
	case <-h.calls.stopping:
		return errStopping
	}
	return fmt.Errorf("still configuring %s, for %s now; it goes on, and the next call waits for it too",
		strings.Join(j.devices, ", "), time.Since(j.startTime).Round(time.Second))
}

// job is the configuration of all devices of a claim.
type job struct {
	devices   []string
	startTime time.Time
	cancel    context.CancelFunc
	done      chan struct{} // closed when err is set
	err       error
}

// jobs are the jobs whose results no call has received yet, at most one for each claim. A job
// outlives the call that started it.
type jobs struct {
	rescan func() // called when a job has ended
	group  sync.WaitGroup

	mu       sync.Mutex
	byUID    map[types.UID]*job
	endTimes map[string]time.Time // end of the last job, by device
}

// start starts the works of a plan in the background.
func (s *jobs) start(ctx context.Context, p *plan) {
	working, cancel := context.WithCancel(context.WithoutCancel(ctx))
	j := &job{startTime: time.Now(), cancel: cancel, done: make(chan struct{})}
	for _, w := range p.works {
		j.devices = append(j.devices, w.device)
	}
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(p.wanted.Namespace, p.wanted.Name), "uid", p.wanted.UID, "devices", j.devices)
	logger.Info("Configuring devices for a claim")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byUID == nil {
		s.byUID, s.endTimes = make(map[types.UID]*job), make(map[string]time.Time)
	}
	s.byUID[p.wanted.UID] = j
	s.group.Go(func() {
		defer cancel()
		j.err = workAll(working, p.works)
		if j.err != nil {
			logger.Error(j.err, "Devices were not configured for a claim", "took", time.Since(j.startTime))
		} else {
			logger.Info("Configured devices for a claim", "took", time.Since(j.startTime))
		}
		s.end(j)
		s.rescan()
	})
}

// workAll does one work after another, since several devices may be on one card. A panic is a
// defect in the agent but must not end the process.
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
		s.endTimes[device] = time.Now()
	}
	close(j.done)
}

// jobOf returns the job of a claim, or nil.
func (s *jobs) jobOf(uid types.UID) *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byUID[uid]
}

// removeJob removes the job of a claim, after a call has received the result.
func (s *jobs) removeJob(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byUID, uid)
}

// stop cancels all jobs and returns when they have ended.
func (s *jobs) stop() {
	s.mu.Lock()
	for _, j := range s.byUID {
		j.cancel()
	}
	s.mu.Unlock()
	s.group.Wait()
}

// readAgain is the time after a job during which a device may still be Unknown because of the job.
// In this time the device is scanned and read again.
const readAgain = 30 * time.Second

// excuseFor returns for how long Unknown health of a device is not reported, because a job is
// configuring the device or has just ended.
func (s *jobs) excuseFor(device string, now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, j := range s.byUID {
		if slices.Contains(j.devices, device) && !isClosed(j.done) {
			return readAgain
		}
	}
	return max(0, readAgain-now.Sub(s.endTimes[device]))
}

// reportedHealth returns the health to report for a device.
func (s *jobs) reportedHealth(device *discovery.Device, now time.Time) discovery.Health {
	if device.Health.Status == discovery.Unknown && s.excuseFor(device.Name, now) > 0 {
		return discovery.Health{Status: discovery.Healthy}
	}
	return device.Health
}
