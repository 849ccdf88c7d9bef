// Package claimstatus writes the health of devices to the status of prepared claims: an entry for
// each device, with the condition Ready.
package claimstatus

import (
	"context"
	"errors"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"chandler.dev/discovery"
	"chandler.dev/driver/publish"
	"chandler.dev/internal/backoff"
	"chandler.dev/internal/ledger/allocation"
)

// The condition of a claim's devices and its reasons.
const (
	ConditionReady  = "Ready"
	ReasonPrepared  = "Prepared"
	ReasonUnhealthy = "Unhealthy"
	ReasonUnknown   = "Unknown" // the device cannot be read at present
	ReasonGone      = "Gone"    // the device has vanished, or another one has replaced it
)

const (
	// retryPause is the pause before a rejected write is repeated.
	retryPause = 10 * time.Second

	// MaxRejections is the number of tries for a status that the API server rejects. If the server
	// does not answer or is overloaded, tries continue at the intervals of [backoff.NewPause].
	MaxRejections = 5

	// callTimeout limits the calls for one claim.
	callTimeout = 10 * time.Second
)

// deviceStatus is the status of a device in the status of a claim.
type deviceStatus struct {
	pool, device, share     string
	status                  metav1.ConditionStatus
	reason, message, ifName string
}

// Writer writes the health of devices to the status of prepared claims. It has a client of its own,
// so that the kubelet's calls neither wait for it nor fail with it. It supports resource.k8s.io/v1
// only: for a server without v1, every claim looks deleted. A Writer is for one goroutine.
type Writer struct {
	client resourceclient.ResourceV1Interface
	claims map[types.UID]attempt
	due    time.Time    // time of the next try after a server did not answer
	pause  wait.Backoff // until due
}

// NewWriter returns a writer that uses the client.
func NewWriter(client resourceclient.ResourceV1Interface) *Writer {
	return &Writer{client: client, pause: backoff.NewPause()}
}

// HealthFunc returns the health of a claim's device.
type HealthFunc func(*allocation.Claim, *allocation.Result) discovery.Health

// attempt is the wanted status of a claim's devices, and the result of writing it.
type attempt struct {
	statuses []deviceStatus
	failures int          // number of rejections
	nextTry  time.Time    // time of the next try
	pause    wait.Backoff // until the next try, while the server has faults
	written  bool
}

// WriteStatuses writes changed statuses of all prepared claims. It returns when to call it again, or
// zero if no write has failed.
func (w *Writer) WriteStatuses(ctx context.Context, claims []*allocation.Claim, health HealthFunc) (next time.Time) {
	before := w.claims
	w.claims = make(map[types.UID]attempt, len(claims))
	for _, c := range claims {
		if c.Configuring {
			continue
		}
		a, known := before[c.UID]
		if statuses := statusesOf(c, health); !slices.Equal(a.statuses, statuses) {
			logGone(ctx, c, a.statuses, statuses)
			a = attempt{statuses: statuses, pause: backoff.NewPause()}
		}
		if now := time.Now(); a.open() && !now.Before(a.nextTry) && !now.Before(w.due) && ctx.Err() == nil {
			w.tryWrite(ctx, c, &a, c.WithoutStatus && !known)
		}
		w.claims[c.UID] = a
	}
	for _, a := range w.claims {
		if at := slices.MaxFunc([]time.Time{a.nextTry, w.due}, time.Time.Compare); a.open() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}

// logGone logs devices that have vanished or were replaced while allocated to a claim.
func logGone(ctx context.Context, c *allocation.Claim, before, now []deviceStatus) {
	for _, s := range now {
		if s.reason == ReasonGone && !slices.Contains(before, s) {
			klog.FromContext(ctx).Error(nil, "A claim does not have its device any more", "claim", klog.KRef(c.Namespace, c.Name), "uid", c.UID, "device", s.device, "reason", s.message)
		}
	}
}

// open reports whether the status must still be written.
func (a *attempt) open() bool { return !a.written && a.failures < MaxRejections }

// tryWrite tries to write the status of a claim once, and stores the result. fresh means that the
// claim has no status yet.
func (w *Writer) tryWrite(ctx context.Context, c *allocation.Claim, a *attempt, fresh bool) {
	err := w.writeClaim(ctx, c, a.statuses, fresh)
	var answer apierrors.APIStatus
	switch {
	case err == nil:
		a.written, w.pause = true, backoff.NewPause()
		return
	case publish.IsRejection(err):
		a.failures++
		a.nextTry = time.Now().Add(retryPause)
	case errors.As(err, &answer): // an admission webhook may have a fault for this claim only
		a.nextTry = time.Now().Add(a.pause.Step())
	default:
		w.due = time.Now().Add(w.pause.Step()) // the other claims would wait as long
	}
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(c.Namespace, c.Name), "uid", c.UID, "reason", err.Error())
	if !a.open() {
		logger.Info("The status of a claim's devices was rejected; it remains unchanged until the status changes")
		return
	}
	logger.V(2).Info("The status of a claim's devices cannot be written; trying again", "refused", a.failures)
}

// writeClaim writes the statuses to the status of a claim. It does nothing for a claim that was
// deleted or replaced by another of the same name. The status of a fresh claim is written without
// reading the claim again.
func (w *Writer) writeClaim(ctx context.Context, c *allocation.Claim, statuses []deviceStatus, fresh bool) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	claims := w.client.ResourceClaims(c.Namespace)
	var entries []*resourceapply.AllocatedDeviceStatusApplyConfiguration
	now := metav1.Now()
	if fresh {
		for _, s := range statuses {
			entries = append(entries, s.statusEntry(s.conditionAt(now)))
		}
	} else {
		claim, err := claims.Get(ctx, c.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && claim.UID != c.UID {
			return nil
		}
		if err != nil {
			return err
		}
		changed := false
		if entries, changed = entriesFor(claim, statuses, now); !changed {
			return nil
		}
	}
	// With the UID, the server refuses the write if the claim was replaced in the meantime.
	apply := resourceapply.ResourceClaim(c.Name, c.Namespace).WithUID(c.UID).
		WithStatus(resourceapply.ResourceClaimStatus().WithDevices(entries...))
	_, err := claims.ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: discovery.Domain, Force: true})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// statusesOf returns the statuses of a claim's devices. A device that the claim has twice, as is
// possible with admin access, has one status, and so do the interchangeable devices of one
// allocation: that of the first device that is not ready, or the names of all of them.
func statusesOf(c *allocation.Claim, healthOf HealthFunc) []deviceStatus {
	var statuses []deviceStatus
	for i := range c.Results {
		result := &c.Results[i]
		said := deviceStatus{pool: result.Pool, device: result.Device, share: string(result.ShareID)}
		health := healthOf(c, result)
		switch {
		case health.Key() == discovery.ConditionGone:
			said.status, said.reason, said.message = metav1.ConditionFalse, ReasonGone, health.Reason
		case health.Status == discovery.Unhealthy && !health.IsUsable():
			said.status, said.reason, said.message = metav1.ConditionFalse, ReasonUnhealthy, health.Reason
		case !health.IsUsable():
			said.status, said.reason, said.message = metav1.ConditionUnknown, ReasonUnknown, health.Reason
		default:
			said.status, said.reason = metav1.ConditionTrue, ReasonPrepared
			if result.IsChosen() {
				said.message = result.Source
			}
		}
		said.ifName = result.InterfaceName()
		same := func(s deviceStatus) bool { return s.is(discovery.Domain, said.pool, said.device, said.share) }
		switch i := slices.IndexFunc(statuses, same); {
		case i < 0:
			statuses = append(statuses, said)
		case statuses[i].status == metav1.ConditionTrue && said.status == metav1.ConditionTrue && result.IsChosen():
			statuses[i].message += ", " + said.message
		case statuses[i].status == metav1.ConditionTrue:
			statuses[i] = said
		}
	}
	return statuses
}

// entriesFor returns the status entries to apply to a claim, for its allocated devices, and whether
// they differ from the present status. The transition time of a condition changes only with its
// status.
func entriesFor(claim *resourceapi.ResourceClaim, statuses []deviceStatus, now metav1.Time) (entries []*resourceapply.AllocatedDeviceStatusApplyConfiguration, changed bool) {
	for _, s := range statuses {
		if !s.allocatedTo(claim) {
			continue
		}
		want := s.conditionAt(now)
		said := s.entryOf(claim)
		before := meta.FindStatusCondition(said.Conditions, ConditionReady)
		if before != nil && before.Status == want.Status {
			want.LastTransitionTime = before.LastTransitionTime
		}
		ifName := ""
		if said.NetworkData != nil {
			ifName = said.NetworkData.InterfaceName
		}
		changed = changed || before == nil || before.Status != want.Status || before.Reason != want.Reason || before.Message != want.Message || ifName != s.ifName
		entries = append(entries, s.statusEntry(want))
	}
	return entries, changed
}

// HasStatus reports whether a claim has a status of this driver's devices.
func HasStatus(claim *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(claim.Status.Devices, func(e resourceapi.AllocatedDeviceStatus) bool { return e.Driver == discovery.Domain })
}

// conditionAt returns the condition of a device with a status since a time.
func (s *deviceStatus) conditionAt(since metav1.Time) metav1.Condition {
	return metav1.Condition{Type: ConditionReady, Status: s.status, Reason: s.reason, Message: s.message, LastTransitionTime: since}
}

// is reports whether the arguments identify this driver's device.
func (s *deviceStatus) is(driver, pool, device, share string) bool {
	return driver == discovery.Domain && s.pool == pool && s.device == device && s.share == share
}

func (s *deviceStatus) allocatedTo(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return s.is(r.Driver, r.Pool, r.Device, string(ptr.Deref(r.ShareID, "")))
	})
}

// entryOf returns the claim's present entry for the device, or an empty entry.
func (s *deviceStatus) entryOf(claim *resourceapi.ResourceClaim) resourceapi.AllocatedDeviceStatus {
	i := slices.IndexFunc(claim.Status.Devices, func(e resourceapi.AllocatedDeviceStatus) bool {
		return s.is(e.Driver, e.Pool, e.Device, ptr.Deref(e.ShareID, ""))
	})
	if i < 0 {
		return resourceapi.AllocatedDeviceStatus{}
	}
	return claim.Status.Devices[i]
}

func (s *deviceStatus) statusEntry(ready metav1.Condition) *resourceapply.AllocatedDeviceStatusApplyConfiguration {
	entry := resourceapply.AllocatedDeviceStatus().WithDriver(discovery.Domain).WithPool(s.pool).WithDevice(s.device).
		WithConditions(metaapply.Condition().WithType(ready.Type).WithStatus(ready.Status).WithReason(ready.Reason).
			WithMessage(ready.Message).WithLastTransitionTime(ready.LastTransitionTime))
	if s.share != "" {
		entry.WithShareID(s.share)
	}
	if s.ifName != "" {
		entry.WithNetworkData(resourceapply.NetworkDeviceData().WithInterfaceName(s.ifName))
	}
	return entry
}
