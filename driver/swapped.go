package driver

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/backoff"
)

// swapLoop reads the claims of each device that was replaced, once for each replacement. These
// claims were allocated the earlier device. Until the request succeeds, no slice contains the device
// (withheldFromSlices), so no claim is allocated the new device. This method does not compare the
// clocks of different hosts. The package documentation describes the claims that it cannot recognize.
func (d *Driver) swapLoop(ctx context.Context) {
	pause := backoff.NewPause()
	for {
		v := d.view.Load()
		var again <-chan time.Time
		if err := d.askPromised(ctx, v); err != nil {
			next := pause.Step()
			klog.FromContext(ctx).Info("The claims for a replaced device cannot be read; trying again", "interval", next, "reason", err.Error())
			again = time.After(next)
		} else {
			pause = backoff.NewPause()
		}
		select {
		case <-ctx.Done():
			return
		case <-v.next:
		case <-again:
		}
	}
}

// askPromised reads the claims of the node's pods from the API server, if a device was replaced and
// its claims are not known yet.
func (d *Driver) askPromised(ctx context.Context, v *view) error {
	promised := make(map[string]map[types.UID]metav1.Time) // by device
	for name, seen := range v.identities {
		if seen.promisedTo != nil && seen.promisedTo.Load() == nil {
			promised[name] = make(map[types.UID]metav1.Time)
		}
	}
	if len(promised) == 0 {
		return nil
	}
	claims, err := d.config.NodeClaims(ctx)
	if err != nil {
		return fmt.Errorf("read the claims of the node's pods: %w", err)
	}
	for _, claim := range claims {
		if claim.Status.Allocation == nil || claim.Status.Allocation.AllocationTimestamp == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			name := result.Device
			if device, found := v.Device(name); found {
				name = device.Name
			}
			if of := promised[name]; of != nil && result.Driver == discovery.Domain && discovery.IsPoolOf(d.config.NodeName, result.Pool) {
				of[claim.UID] = *claim.Status.Allocation.AllocationTimestamp
			}
		}
	}
	for name, claims := range promised {
		v.identities[name].promisedTo.Store(&claims)
	}
	d.Publisher.NoteChange()
	return nil
}
