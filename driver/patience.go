package driver

import (
	"context"
	"errors"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/traces"
)

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
		return blocked.Reclaiming || blocked.Changing
	case errors.Is(err, discovery.ErrTransient):
		return true
	}
	reason := RefusalOf(err)
	return waited && (reason == RefusedGone || reason == RefusedChanged)
}
