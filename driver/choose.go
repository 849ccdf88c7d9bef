package driver

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

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
		case b != nil && (blocked == nil || b.Reclaiming || b.Changing):
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
