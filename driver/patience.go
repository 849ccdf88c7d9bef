package driver

import (
	"context"
	"errors"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/traces"
)

// passLimit is how long after its beginning a call still waits for devices that will be had soon: those
// that are handed over, given back to their driver, made or removed. The kubelet takes a refusal for no
// error of the pod's (SyncPod in pkg/kubelet/kuberuntime/kuberuntime_manager.go, 1.28 to 1.37), and asks
// again at its next look at the pod, after 60 to 90 seconds. It waits 45 seconds for an answer (see
// [callLimit]); the rest is for the stages that follow.
const passLimit = 15 * time.Second

// passInterval is how long a call that waits takes at most until it looks again.
const passInterval = time.Second

// preparePatiently prepares a claim. If it is refused for something that passes by itself, it is tried
// again until the patience ends. Nothing is locked meanwhile.
func (d *Driver) preparePatiently(ctx, patience context.Context, claim *resourceapi.ResourceClaim) (devices []kubeletplugin.Device, err error) {
	for waited := false; ; waited = true {
		freed, view := d.ledger.Freed(), d.view.Load()
		devices, err = d.prepareSafely(ctx, claim)
		if !passes(err, waited) || patience.Err() != nil {
			return devices, err
		}
		_, end := traces.Stage(ctx, "wait until the device is free")
		timer := time.NewTimer(passInterval)
		select {
		case <-freed:
		case <-view.next:
		case <-timer.C:
		case <-patience.Done():
		case <-d.calls.stopping:
		}
		timer.Stop()
		end(err)
		if patience.Err() != nil || closed(d.calls.stopping) {
			return devices, err
		}
	}
}

// passes reports whether a refusal passes by itself, as a rule within seconds. A device that was given
// back or removed a moment ago may have been described before.
func passes(err error, waited bool) bool {
	var blocked *ledger.Blocked
	switch {
	case errors.As(err, &blocked):
		return blocked.Passing || blocked.Changing
	case errors.Is(err, discovery.ErrPassing):
		return true
	}
	reason := RefusalOf(err)
	return waited && (reason == RefusedGone || reason == RefusedChanged)
}
