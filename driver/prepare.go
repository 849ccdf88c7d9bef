package driver

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/outputs"
	"chandler.dev/driver/publish"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/traces"
)

// maxAtOnce limits how many claims of one call are processed concurrently.
const maxAtOnce = 16

// PrepareResourceClaims prepares each claim separately, so that one failure does not affect other
// claims. It waits until this instance is active, unless there are no claims, as in [Driver.Probe].
// It implements [kubeletplugin.DRAPlugin] and is not for other callers.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	d.timeRead(ctx)
	ctx, cancel := inTime(ctx)
	defer cancel()
	done, err := d.calls.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	patient, cancel := context.WithTimeout(ctx, passLimit)
	defer cancel()
	results := make([]kubeletplugin.PrepareResult, len(claims))
	runEach(len(claims), func(i int) {
		var devices []kubeletplugin.Device
		named := kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: claims[i].Namespace, Name: claims[i].Name}, UID: claims[i].UID}
		err := d.timeClaim(ctx, "prepare", named, func(ctx context.Context) (err error) {
			devices, err = d.claims.preparePatiently(ctx, patient, claims[i])
			return err
		})
		if err != nil {
			klog.FromContext(ctx).Info("A claim is not prepared", "claim", klog.KObj(claims[i]), "uid", claims[i].UID, "reason", err.Error())
			if RefusalOf(err) == RefusedHeld {
				notify(d.claimRefused)
			}
			err = fmt.Errorf("prepare claim %s/%s: %w", claims[i].Namespace, claims[i].Name, err)
		}
		results[i] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	})
	notify(d.claimPrepared)
	answer := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for i, claim := range claims {
		answer[claim.UID] = results[i]
	}
	return answer, nil
}

// UnprepareResourceClaims releases each claim separately. It needs neither the API server nor the
// host. It implements [kubeletplugin.DRAPlugin] and is not for other callers.
func (d *Driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	ctx, cancel := inTime(ctx)
	defer cancel()
	done, err := d.calls.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	results := make([]error, len(claims))
	runEach(len(claims), func(i int) {
		err := d.timeClaim(ctx, "unprepare", claims[i], func(ctx context.Context) error { return d.claims.endClaim(ctx, claims[i].UID) })
		if err != nil {
			klog.FromContext(ctx).Info("A claim is not unprepared", "claim", klog.KRef(claims[i].Namespace, claims[i].Name), "uid", claims[i].UID, "reason", err.Error())
			results[i] = fmt.Errorf("unprepare claim %s/%s: %w", claims[i].Namespace, claims[i].Name, err)
		}
	})
	answer := make(map[types.UID]error, len(claims))
	for i, claim := range claims {
		answer[claim.UID] = results[i]
	}
	return answer, nil
}

// runEach calls work for the numbers below n, at most maxAtOnce at a time. For n = 1, as in most
// calls, it calls work directly, since on a busy machine the start of another thread takes as long
// as the work.
func runEach(n int, work func(i int)) {
	if n == 1 {
		work(0)
		return
	}
	var group sync.WaitGroup
	slots := make(chan struct{}, maxAtOnce)
	for i := range n {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			work(i)
		})
	}
	group.Wait()
}

// claimHandler prepares and ends claims.
type claimHandler struct {
	config    *Config
	ledger    *ledger.Ledger
	view      *views
	calls     *calls
	publisher *publish.Publisher

	jobs           jobs
	choices        choices
	newAllocations sync.Map      // first sight of a new allocation of a claim, by UID
	termination    time.Duration // how long containers of a pod that was deleted by force may continue to run; replaced in tests
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
		if err = h.refuseReallocation(plan); err == nil {
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
	if err := h.recordClaim(ctx, plan); err != nil {
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
}

// planClaim looks up the devices of the claim, and returns an error if the claim cannot have them.
func (h *claimHandler) planClaim(ctx context.Context, claim *resourceapi.ResourceClaim) (*plan, error) {
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
	p := &plan{wanted: wanted, devices: devices, view: view}
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
// nevertheless (pkg/kubelet/cm/dra/claiminfo.go, newClaimInfoFromState, in 1.34 to 1.37).
func (h *claimHandler) refuseReallocation(p *plan) error {
	if p.state != allocation.Allocated {
		return nil // no container can have it
	}
	since, _ := h.newAllocations.LoadOrStore(p.wanted.UID, time.Now())
	if left := h.termination - time.Since(since.(time.Time)); left > 0 {
		return withRefusal(RefusedWaiting, fmt.Errorf("the claim was allocated again while it was prepared; containers may use its previous devices for %s", left.Round(time.Second)))
	}
	return nil
}

// recordClaim records the claim in the ledger and then writes its outputs. After a failure the
// claim has the state in its record, and the next call continues.
func (h *claimHandler) recordClaim(ctx context.Context, plan *plan) error {
	wanted := plan.wanted
	if err := traces.Do(ctx, "write record", func() error { return h.ledger.AllocateClaim(wanted, allocation.Allocated, plan.view) }); err != nil {
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

// offeredFor reports whether the published slices may depend on a claim. A device that is gone
// leaves the slices when its claim ends, and a device that is allocated in another form, or by its
// own name in place of a common name, returns to them. Without counters, allocated devices have
// precedence over others.
func (h *claimHandler) offeredFor(r *allocation.Claim) bool {
	if r == nil || r.Configuring || !h.publisher.KeptFeatures().Counters {
		return true
	}
	view := h.view.Load()
	return slices.ContainsFunc(r.Results, func(result allocation.Result) bool {
		device, found := view.Present.Device(result.Source)
		return !found || device.Sharing != nil || result.Consumes != nil || device.Interchangeable != ""
	})
}

// newClaim returns the record of a claim without the edits, and the devices of its results. It
// includes only results of this driver.
func (h *claimHandler) newClaim(claim *resourceapi.ResourceClaim, view *view) (*allocation.Claim, []rules.Offered, error) {
	r := h.ledger.NewClaim(claim.UID, claim.Namespace, claim.Name)
	r.Pod, r.Users, r.WithoutStatus = extendedResourcePod(claim), usersOf(claim), !hasStatus(claim)
	if claim.Status.Allocation == nil {
		return nil, nil, errors.New("not allocated")
	}
	var devices []rules.Offered
	for i, allocated := range claim.Status.Allocation.Devices.Results {
		if allocated.Driver != discovery.Domain {
			continue
		}
		if allocated.Pool != h.config.NodeName {
			return nil, nil, fmt.Errorf("request %s: device %s/%s is not of this node, whose pool is %s", allocated.Request, allocated.Pool, allocated.Device, h.config.NodeName)
		}
		device, found := view.Device(allocated.Device)
		given := []rules.Offered{device}
		if !found {
			chosen, err := h.chooseDevices(r, &allocated, view)
			if err != nil {
				return nil, nil, fmt.Errorf("request %s: %w", allocated.Request, err)
			}
			given = chosen
		}
		for j := range given {
			result := newResult(claim.UID, i, &allocated, &given[j], !found)
			if r.Pod != "" && h.config.ResourceOf != nil {
				result.Resource = h.config.ResourceOf(classOf(claim, allocated.Request))
			}
			for name, taken := range result.Consumes {
				if taken.Sign() < 0 {
					return nil, nil, fmt.Errorf("request %s: device %s: %s of its %s would be consumed", allocated.Request, allocated.Device, taken.String(), name)
				}
			}
			r.Results = append(r.Results, result)
		}
		devices = append(devices, given...)
	}
	return r, devices, nil
}

// usersOf returns the pods that a claim is reserved for.
func usersOf(claim *resourceapi.ResourceClaim) (pods []types.UID) {
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup == "" && consumer.Resource == "pods" {
			pods = append(pods, consumer.UID)
		}
	}
	return pods
}

// newResult returns the record of an allocation result, whose device was chosen if the allocation has a
// common name.
func newResult(uid types.UID, i int, allocated *resourceapi.DeviceRequestAllocationResult, device *rules.Offered, chosen bool) allocation.Result {
	r := allocationOf(allocated)
	r.Shared = device.Shareable
	r.Silicon, r.Whole, r.Takes = device.Silicon(), device.PartOf == nil, device.Takes
	r.Source, r.Identity, r.Driver = device.Name, device.Identity, device.Attributes.String("driver")
	if !r.Shared && !chosen {
		r.Consumes = consumedCapacity(allocated, device)
	}
	if _, numbered := r.Consumes[discovery.Shares]; numbered {
		r.Shares = device.Shares()
	}
	r.CDI = cdi.Name(uid, i, r.GivenDevice(), r.ShareID)
	for _, f := range device.FilesAs(device.Resource()) {
		r.Files = append(r.Files, allocation.HostFile(f))
	}
	return r
}

// allocationOf returns the part of a record that identifies an allocation result.
func allocationOf(allocated *resourceapi.DeviceRequestAllocationResult) allocation.Result {
	return allocation.Result{
		Request: allocated.Request,
		Pool:    allocated.Pool,
		Device:  allocated.Device,
		ShareID: ptr.Deref(allocated.ShareID, ""),
		Admin:   ptr.Deref(allocated.AdminAccess, false),
	}
}

// consumedCapacity returns how much an allocation consumes of a shared device, or nil for an
// exclusive allocation.
func consumedCapacity(allocated *resourceapi.DeviceRequestAllocationResult, device *rules.Offered) map[resourceapi.QualifiedName]resource.Quantity {
	switch {
	case allocated.ShareID != nil:
		return allocated.ConsumedCapacity
	case device.Sharing != nil && allocated.Device != device.Name: // a numbered share
		return map[resourceapi.QualifiedName]resource.Quantity{device.Sharing.Capacity: device.Sharing.Unit}
	}
	return nil
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
