package driver

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/outputs"
	"chandler.dev/driver/publish"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/traces"
)

// claimHandler prepares and ends claims.
type claimHandler struct {
	config    *Config
	ledger    *ledger.Ledger
	view      *views
	calls     *calls
	publisher *publish.Publisher

	jobs           jobs
	choices        choices
	claimEnds      sync.Map      // time of the end of the last claim, by device; see interfaceReturn
	newAllocations sync.Map      // time at which a new allocation of a claim was first seen, by UID
	termination    time.Duration // how long containers of a pod that was deleted by force may continue to run; replaced in tests
}

// passLimit is how long a call waits for devices that will soon be available, such as devices that
// are being reclaimed, returned to their driver, created or removed. The kubelet does not treat a
// refusal as a failure of the pod (SyncPod in pkg/kubelet/kuberuntime/kuberuntime_manager.go, 1.28
// to 1.37), and calls again at the next synchronization of the pod, after 60 to 90 seconds. It
// waits 45 seconds for an answer (see [callLimit]); the rest of this time is for the remaining
// stages.
const passLimit = 15 * time.Second

// passInterval is the longest pause between two tries of a waiting call.
const passInterval = time.Second

// preparePatiently prepares a claim. After a temporary refusal it tries again until the patience
// context ends. It holds no lock between tries.
func (h *claimHandler) preparePatiently(ctx, patience context.Context, claim *resourceapi.ResourceClaim) (devices []kubeletplugin.Device, err error) {
	for waited := false; ; waited = true {
		freed, view := h.ledger.FreedSignal(), h.view.Load()
		devices, err = h.prepareSafely(ctx, claim)
		if !isTransient(err, waited) || patience.Err() != nil {
			return devices, err
		}
		_, end := traces.StartStage(ctx, "wait until the device is free")
		timer := time.NewTimer(passInterval)
		select {
		case <-freed:
		case <-view.next:
		case <-timer.C:
		case <-patience.Done():
		case <-h.calls.stopping:
		}
		timer.Stop()
		end(err)
		if patience.Err() != nil || isClosed(h.calls.stopping) {
			return devices, err
		}
	}
}

// isTransient reports whether a refusal is temporary, and will usually pass within seconds. While a
// call waits, this includes a device that is gone or changed: the scan may have been older than the
// return or removal of the device.
func isTransient(err error, waited bool) bool {
	var blocked *exclusion.Blocked
	switch {
	case errors.As(err, &blocked):
		return blocked.IsTransient()
	case errors.Is(err, discovery.ErrTransient):
		return true
	}
	reason := RefusalOf(err)
	return waited && (reason == RefusedGone || reason == RefusedChanged)
}

// prepareSafely prepares a claim. A panic is a defect in the agent, but must not affect other
// claims or end the process.
func (h *claimHandler) prepareSafely(ctx context.Context, claim *resourceapi.ResourceClaim) (devices []kubeletplugin.Device, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			klog.FromContext(ctx).Error(nil, "Preparing a claim panicked", "claim", klog.KObj(claim), "panic", cause, "stack", string(debug.Stack()))
			devices, err = nil, fmt.Errorf("panic: %v", cause)
		}
	}()
	_, end := traces.StartStage(ctx, "wait for another call")
	unlock, err := h.ledger.Lock(ctx, string(claim.UID))
	end(err)
	if err != nil {
		return nil, fmt.Errorf("wait for another call for the claim: %w", err)
	}
	defer unlock()
	if h.config.OnPrepare != nil {
		h.config.OnPrepare(claim)
	}
	return h.prepare(ctx, claim)
}

// prepare does the steps in this order: look up the devices, read and accept the parameters, verify
// the devices, record the claim, write host files, write the CDI spec. The spec comes last, so that
// every device of a container is in the ledger. If devices must be configured first, the claim is
// recorded before the configuration, and then the devices are looked up again. Nothing is rolled
// back: the kubelet records a claim before it calls. After a failure it calls again or unprepares
// the claim (pkg/kubelet/cm/dra/manager.go in 1.34 and 1.37).
func (h *claimHandler) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	defer h.choices.forget(claim.UID)
	if err := h.join(ctx, claim.UID); err != nil {
		return nil, withRefusal(RefusedConfiguring, err)
	}
	if err := h.ledger.SettleClaim(string(claim.UID)); err != nil {
		return nil, err
	}
	_, end := traces.StartStage(ctx, "look up and verify devices")
	plan, err := h.planClaim(ctx, claim)
	end(err)
	if err == nil && plan.earlier != nil && !plan.earlier.SameAllocation(plan.wanted) {
		if err = h.refuseReallocation(ctx, claim, plan); err == nil {
			plan.earlier, plan.state, err = nil, allocation.None, h.letGo(ctx, claim.UID)
		}
	}
	if err == nil && len(plan.works) > 0 {
		_, end := traces.StartStage(ctx, "configure devices")
		plan, err = h.runPlan(ctx, claim, plan)
		err = withRefusal(RefusedConfiguring, err)
		end(err)
	}
	if err != nil || len(plan.wanted.Results) == 0 {
		return nil, err
	}
	h.newAllocations.Delete(claim.UID)
	if plan.isAnswered() {
		if err := h.startDaemons(ctx, plan); err != nil {
			return nil, err
		}
		if err := h.ledger.Write(plan.earlier.Key()); err != nil {
			return nil, err
		}
		return preparedDevices(plan.earlier, plan.devices), nil
	}
	if err := h.recordClaim(ctx, claim, plan); err != nil {
		return nil, err
	}
	return preparedDevices(plan.wanted, plan.devices), nil
}

// plan contains everything needed to prepare a claim.
type plan struct {
	wanted  *allocation.Claim
	earlier *allocation.Claim // nil if there is none
	state   allocation.State  // of the earlier claim
	devices []rules.Offered   // the devices of the results
	works   []work
	orders  []discovery.Order // orders for the claim's programs
	view    *view
	changes int // number of ended changes of devices before the plan; see [ledger.Leases.EndedChanges]
}

// isAnswered reports whether the claim is already prepared with the same allocation and the same
// device nodes.
func (p *plan) isAnswered() bool {
	if !p.isKept() {
		return false
	}
	for i := range p.wanted.Results {
		if !slices.Equal(p.wanted.Results[i].Nodes, p.earlier.Results[i].Nodes) {
			return false
		}
	}
	return true
}

// has reports whether the claim was given the same allocation in this boot.
func (p *plan) has() bool {
	return (p.state == allocation.Allocated || p.state == allocation.Configuring) && p.earlier.SameAllocation(p.wanted)
}

// isKept reports whether a container may have the claim's devices. No container has devices under
// configuration.
func (p *plan) isKept() bool { return p.has() && p.state == allocation.Allocated }

// planClaim looks up the devices of the claim, and returns an error if the claim cannot have them.
func (h *claimHandler) planClaim(ctx context.Context, claim *resourceapi.ResourceClaim) (*plan, error) {
	changes := h.ledger.Leases.EndedChanges()
	view, err := h.view.await(ctx, h.calls.stopping)
	if err != nil {
		return nil, err
	}
	wanted, devices, err := h.newClaim(claim, view)
	if err != nil {
		return nil, withRefusal(RefusedGone, err)
	}
	parameters, err := h.requestParameters(claim, wanted.Results)
	if err != nil {
		return nil, withRefusal(RefusedParameters, err)
	}
	p := &plan{wanted: wanted, devices: devices, view: view, changes: changes}
	p.earlier, p.state = h.ledger.Claim(claim.UID)
	// Parameters are not checked again for devices that a container may have: an interface that was
	// moved to a container is no longer on the host.
	if !p.isKept() {
		if err := h.accept(wanted.Results, devices, parameters); err != nil {
			return nil, withRefusal(RefusedParameters, err)
		}
	}
	if p.orders, err = h.claimOrders(wanted.Results, devices, parameters); err != nil {
		return nil, withRefusal(RefusedParameters, err)
	}
	if p.works, err = h.planWork(wanted.Key(), wanted.Results, devices, parameters); err != nil {
		return nil, withRefusal(RefusedParameters, err)
	}
	h.setEdits(wanted.Results, devices, parameters, claim)
	for i := range wanted.Results {
		before, found := p.earlier.Find(&wanted.Results[i])
		if !found {
			if err := view.sameSince(claim, &wanted.Results[i]); err != nil {
				return nil, withRefusal(RefusedChanged, err)
			}
		} else if devices[i].Creation != nil {
			// A reboot has removed the device. The device that is created next must have the same
			// driver.
			wanted.Results[i].Driver = before.Driver
		}
		if err := verify(&wanted.Results[i], h.config.HostFS, before); err != nil {
			return nil, withRefusal(RefusedChanged, err)
		}
		if !p.isKept() && len(p.works) == 0 && !wanted.Results[i].Admin {
			if err := requireDriver(&devices[i]); err != nil {
				h.config.Rescan()
				return nil, withRefusal(RefusedChanged, err)
			}
		}
		if p.has() {
			wanted.Results[i].KeepNodes(before.Nodes)
		} else if err := verifyInterfaces(&wanted.Results[i], &devices[i].Device, h.config.HostFS); err != nil {
			h.config.Rescan()
			return nil, withRefusal(RefusedChanged, err)
		}
	}
	wanted.KeepUnknown(p.earlier)
	return p, nil
}

// refuseReallocation refuses a claim with a new allocation while containers may still use the
// devices of the earlier one. The earlier allocation ended with its last pod, but the kubelet has
// not unprepared the claim, so the pod was deleted by force. A restarted kubelet prepares the claim
// nevertheless (pkg/kubelet/cm/dra/claiminfo.go, newClaimInfoFromState, in 1.34 to 1.37). Up to 1.36,
// a kubelet that was not restarted starts other pods of the claim with the earlier devices
// (PrepareResources in pkg/kubelet/cm/dra/manager.go, read in 1.36).
func (h *claimHandler) refuseReallocation(ctx context.Context, claim *resourceapi.ResourceClaim, p *plan) error {
	if p.state != allocation.Allocated {
		return nil // no container can have it
	}
	since, _ := h.newAllocations.LoadOrStore(p.wanted.UID, time.Now())
	if left := h.termination - time.Since(since.(time.Time)); left > 0 {
		return withRefusal(RefusedWaiting, fmt.Errorf("the claim was allocated again while it was prepared; containers may use its previous devices for %s", left.Round(time.Second)))
	}
	started, err := h.config.StartedPods(ctx, claim)
	switch {
	case err != nil:
		return withRefusal(RefusedWaiting, fmt.Errorf("the claim was allocated again while it was prepared; read the pods with its previous devices: %w", err))
	case len(started) > 0:
		return withRefusal(RefusedWaiting, fmt.Errorf("the claim was allocated again while it was prepared; its previous devices are in use by pod %s", strings.Join(started, ", ")))
	}
	return nil
}

// recordClaim records the claim in the ledger and then writes its outputs. After a failure the
// claim has the state in its record, and the next call continues.
func (h *claimHandler) recordClaim(ctx context.Context, claim *resourceapi.ResourceClaim, plan *plan) error {
	wanted := plan.wanted
	defer func() { // the claim may be recorded after a failure too
		if slices.ContainsFunc(wanted.Results, func(r allocation.Result) bool { return h.isMisplaced(&r, plan.view) }) {
			h.publisher.NoteChange()
		}
	}()
	if err := traces.Do(ctx, "write record", func() error { return h.ledger.AllocateClaim(wanted, allocation.Allocated, plan.view) }); err != nil {
		return err
	}
	if err := h.checkUnchanged(ctx, claim, plan); err != nil {
		return err
	}
	if err := h.startDaemons(ctx, plan); err != nil {
		return err
	}
	if err := traces.Do(ctx, "write CDI spec and files", func() error { return h.ledger.Write(wanted.Key()) }); err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Prepared claim", "claim", klog.KRef(wanted.Namespace, wanted.Name), "uid", wanted.UID, "devices", len(wanted.Results))
	return nil
}

// checkUnchanged returns a temporary error if the agent has changed a device between the plan and the
// allocation, as when a device under vfio is returned to its driver. From the allocation on, the agent
// changes the devices for this claim only, and the next try configures them again.
func (h *claimHandler) checkUnchanged(ctx context.Context, claim *resourceapi.ResourceClaim, p *plan) error {
	if h.ledger.Leases.EndedChanges() == p.changes {
		return nil
	}
	now, err := h.planClaim(ctx, claim)
	if err == nil && (len(now.works) > 0 || !now.isAnswered()) {
		err = withRefusal(RefusedChanged, errors.New("its devices were changed while it was prepared"))
	}
	if err != nil {
		return discovery.TransientError(err)
	}
	return nil
}

// startDaemons starts the programs of a claim, and returns when they are ready. The claim already
// has its devices, and keeps them after a failure. Programs that were started end with the claim.
func (h *claimHandler) startDaemons(ctx context.Context, p *plan) error {
	if len(p.orders) == 0 {
		return nil
	}
	err := traces.Do(ctx, "request sharing daemons", func() error { return h.config.StartDaemons(ctx, p.wanted.UID, p.orders) })
	return withRefusal(RefusedConfiguring, err)
}

// endClaim ends a claim. Missing files are not an error. After a failure the claim keeps its
// devices.
func (h *claimHandler) endClaim(ctx context.Context, uid types.UID) error {
	unlock, err := h.ledger.Lock(ctx, string(uid))
	if err != nil {
		return fmt.Errorf("wait for another call for the claim: %w", err)
	}
	defer unlock()
	return h.letGo(ctx, uid)
}

// letGo ends a claim for callers that hold the claim's lock.
func (h *claimHandler) letGo(ctx context.Context, uid types.UID) error {
	if err := h.callOff(ctx, uid); err != nil {
		return err
	}
	h.newAllocations.Delete(uid)
	c, _ := h.ledger.Claim(uid)
	h.noteEnd(c) // before the publisher misses the claim
	if err := traces.Do(ctx, "remove CDI spec, files and record", func() error { return h.ledger.End(uid, h.view.Load()) }); err != nil {
		return err
	}
	if h.offeredFor(c) {
		h.publisher.NoteChange()
	}
	if h.config.OnClaimEnd != nil {
		h.config.OnClaimEnd()
	}
	return nil
}

// interfaceReturn is how long after its claim a network interface may return to the host. The kernel
// moves an interface to the host's network namespace after the last process of the pod's namespace
// has ended (default_device_exit_net in net/core/dev.c).
const interfaceReturn = time.Minute

// noteEnd records the time at which a claim ends, and forgets the claims that ended more than
// interfaceReturn ago.
func (h *claimHandler) noteEnd(c *allocation.Claim) {
	if c == nil {
		return
	}
	h.claimEnds.Range(func(device, end any) bool {
		if time.Since(end.(time.Time)) >= interfaceReturn {
			h.claimEnds.CompareAndDelete(device, end)
		}
		return true
	})
	for i := range c.Results {
		h.claimEnds.Store(c.Results[i].Source, time.Now())
	}
}

// returnsFor returns for how long the network interface of a device without one may still return
// from the pod of an ended claim.
func (h *claimHandler) returnsFor(device *discovery.Device, now time.Time) time.Duration {
	end, ended := h.claimEnds.Load(device.Name)
	if !ended || !isNetworkFunction(device) || device.Attributes.String("ifName") != "" {
		return 0
	}
	return interfaceReturn - now.Sub(end.(time.Time))
}

// mayGetInterface reports whether the network interface of a device may return from the pod of an
// ended claim.
func (h *claimHandler) mayGetInterface(device rules.Offered) bool {
	return h.returnsFor(&device.Device, time.Now()) > 0
}

func isNetworkFunction(device *discovery.Device) bool {
	return device.Attributes.String("kind") == "nic"
}

// offeredFor reports whether the published slices may depend on a claim. A device that is gone
// leaves the slices when its claim ends, and a device that is allocated in another form, or by its
// own name in place of a common name, returns to them. A network function soon loses the attributes
// of an interface that does not return. Without counters, allocated devices have precedence over
// others.
func (h *claimHandler) offeredFor(r *allocation.Claim) bool {
	if r == nil || r.Configuring || !h.publisher.KeptFeatures().Counters {
		return true
	}
	view := h.view.Load()
	return slices.ContainsFunc(r.Results, func(result allocation.Result) bool {
		device, found := view.Present.Device(result.Source)
		return !found || device.Sharing != nil || result.Consumes != nil || device.Interchangeable != "" || isNetworkFunction(&device.Device) || h.isMisplaced(&result, view)
	})
}

// isMisplaced reports whether a claim has a device by another pool than that of the device's kind, or
// than another claim has a device of the same physical device. The pools change when such a claim
// begins or ends.
func (h *claimHandler) isMisplaced(r *allocation.Result, view *view) bool {
	device, found := view.Present.Device(r.Source)
	return found && r.Pool != discovery.PoolName(h.config.NodeName, device.InMainPool()) ||
		slices.ContainsFunc(h.ledger.Claims(), func(c *allocation.Claim) bool {
			return slices.ContainsFunc(c.Results, func(other allocation.Result) bool {
				return other.Pool != r.Pool && (other.Silicon == r.Silicon || other.Device == r.Device)
			})
		})
}

// preparedDevices returns the kubelet's answer for a prepared claim. A device's own CDI ID comes
// first, since the kubelet uses it as the key of health reports.
func preparedDevices(r *allocation.Claim, given []rules.Offered) []kubeletplugin.Device {
	devices := make([]kubeletplugin.Device, 0, len(r.Results))
	for i, result := range r.Results {
		device := kubeletplugin.Device{
			Requests:     []string{result.Request},
			PoolName:     result.Pool,
			DeviceName:   result.Device,
			CDIDeviceIDs: []string{cdi.ID(result.CDI)},
			Metadata:     outputs.DeviceMetadata(&result, &given[i]),
		}
		if result.ShareID != "" {
			device.ShareID = &result.ShareID
		}
		devices = append(devices, device)
	}
	return devices
}
