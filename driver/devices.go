package driver

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/claimstatus"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// newClaim returns the record of a claim without the edits, and the devices of its results. It
// includes only results of this driver.
func (h *claimHandler) newClaim(claim *resourceapi.ResourceClaim, view *view) (*allocation.Claim, []rules.Offered, error) {
	r := h.ledger.NewClaim(claim.UID, claim.Namespace, claim.Name)
	r.Pod, r.Users, r.WithoutStatus = extendedResourcePod(claim), usersOf(claim), !claimstatus.HasStatus(claim)
	if claim.Status.Allocation == nil {
		return nil, nil, errors.New("not allocated")
	}
	var devices []rules.Offered
	for i, allocated := range claim.Status.Allocation.Devices.Results {
		if allocated.Driver != discovery.Domain {
			continue
		}
		// The claim may name a pool in which the device was published before.
		if !discovery.IsPoolOf(h.config.NodeName, allocated.Pool) {
			return nil, nil, fmt.Errorf("request %s: device %s/%s is not of this node, %s", allocated.Request, allocated.Pool, allocated.Device, h.config.NodeName)
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

// extendedResourcePod returns the pod for whose extended resources the scheduler made a claim, and
// "" for other claims. The pod is the controller of such a claim
// (pkg/scheduler/framework/plugins/dynamicresources/extendeddynamicresources.go, in 1.34 to 1.37).
func extendedResourcePod(claim *resourceapi.ResourceClaim) string {
	if claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] != "true" {
		return ""
	}
	for _, owner := range claim.OwnerReferences {
		if owner.Kind == "Pod" && owner.Controller != nil && *owner.Controller {
			return owner.Name
		}
	}
	return ""
}

// classOf returns the DeviceClass of a request. Each request of a claim for extended resources
// names one.
func classOf(claim *resourceapi.ResourceClaim, request string) string {
	for i := range claim.Spec.Devices.Requests {
		if r := &claim.Spec.Devices.Requests[i]; r.Name == request && r.Exactly != nil {
			return r.Exactly.DeviceClassName
		}
	}
	return ""
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

// choices are the interchangeable devices that calls in progress have chosen, so that concurrent
// calls choose different ones. The ledger decides whether a claim gets the chosen device.
type choices struct {
	mu       sync.Mutex // guards the fields below
	byDevice map[string]types.UID
}

// reserve reserves a device for the call of a claim, and reports whether no other call has it.
func (c *choices) reserve(device string, uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byDevice == nil {
		c.byDevice = make(map[string]types.UID)
	}
	if of, reserved := c.byDevice[device]; reserved && of != uid {
		return false
	}
	c.byDevice[device] = uid
	return true
}

// forget ends the reservations of a claim's call. By then the claim is in the ledger or was refused.
func (c *choices) forget(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for device, of := range c.byDevice {
		if of == uid {
			delete(c.byDevice, device)
		}
	}
}

// chooseDevices returns the devices for an allocation by a common name. A claim that was prepared
// before keeps its devices, even if they no longer have the common name: it depends on the driver and
// on the configuration. Other claims get the first free devices. Withheld devices are the last
// choice: the allocation may precede the withdrawal.
func (h *claimHandler) chooseDevices(c *allocation.Claim, allocated *resourceapi.DeviceRequestAllocationResult, v *view) (chosen []rules.Offered, err error) {
	wanted, count := allocationOf(allocated), int64(1)
	if shares, consumed := allocated.ConsumedCapacity[discovery.Shares]; consumed {
		count = shares.Value()
	}
	if count < 1 || count > pool.MaxChosen {
		return nil, fmt.Errorf("device %s/%s: %d of its devices, want 1 to %d", allocated.Pool, allocated.Device, count, pool.MaxChosen)
	}
	earlier, state := h.ledger.Claim(c.UID)
	before := earlier.SourcesOf(&wanted)
	isBefore := func(device *rules.Offered) bool { return slices.Contains(before, device.Name) }
	if state != allocation.Ended && len(before) > 0 {
		for _, source := range before {
			device, found := v.Device(source)
			if !found {
				return nil, v.missingReason(allocated.Pool, source)
			}
			chosen = append(chosen, device)
		}
		return chosen, nil
	}
	alike := pool.LookupInterchangeable(v.snapshot, allocated.Device)
	if len(alike) == 0 {
		return nil, v.missingReason(allocated.Pool, allocated.Device)
	}
	present := h.ledger.View(v)
	ofOthers := present.EarlierSources()
	// After a reboot, the claim gets its earlier devices if they are free, also if they are unhealthy: a
	// claim that names its device gets it too. It gets the earlier devices of other claims only if no
	// other device is free. A device without some of the attributes, such as a function whose interface
	// is still in a pod, comes after those with all of them.
	slices.SortStableFunc(alike, func(a, b *rules.Offered) int {
		rank := func(device *rules.Offered) int {
			switch {
			case v.withheld[device.Silicon()] != "":
				return 3
			case isBefore(device):
				return 0
			case ofOthers[device.Name]:
				return 2
			}
			return 1
		}
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(len(b.Attributes), len(a.Attributes)))
	})
	var blocked *exclusion.Blocked
	for _, device := range alike {
		hold := allocation.Hold{Device: device.Name, Silicon: device.Silicon(), Whole: device.PartOf == nil, Open: wanted.Admin}
		hasAlready := func(r allocation.Result) bool { return r.Source == device.Name }
		switch b := present.BlockedBy(discovery.ModeDRA, c.Key(), []allocation.Hold{hold}); {
		case !device.Health.IsUsable() && !isBefore(device), slices.ContainsFunc(c.Results, hasAlready):
		case b != nil && (blocked == nil || b.IsTransient()):
			blocked = b
		case b == nil && (wanted.Admin || h.reserveFree(device.Name, c, hold, v)):
			chosen = append(chosen, *device)
		}
		if int64(len(chosen)) == count {
			return chosen, nil
		}
	}
	err = fmt.Errorf("device %s/%s: %d of its %d devices are free, want %d", allocated.Pool, allocated.Device, len(chosen), len(alike), count)
	if blocked == nil {
		return nil, discovery.TransientError(err)
	}
	return nil, fmt.Errorf("%w: %w", err, blocked)
}

// reserveFree reserves a device for the call of a claim, and reports whether the device is free. It
// looks at the ledger once more after that: another call may have allocated the device and ended its
// reservation since the caller's view.
func (h *claimHandler) reserveFree(device string, c *allocation.Claim, hold allocation.Hold, v *view) bool {
	return h.choices.reserve(device, c.UID) && h.ledger.View(v).BlockedBy(discovery.ModeDRA, c.Key(), []allocation.Hold{hold}) == nil
}
