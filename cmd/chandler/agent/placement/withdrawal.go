package placement

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/backoff"
)

const (
	// WithdrawalTime is how long the node's slices must have lacked a device before the device can
	// leave DRA. A scheduler may allocate a device from a slice in its cache that was replaced since,
	// and binds the pod afterwards. After this time, the decisions from the earlier slice concern pods
	// that are bound to the node or nominated for it; see [cluster.Node.NodeClaims].
	WithdrawalTime = time.Minute

	// decisionTime is how long after the slices the scheduler may store an allocation that it decided
	// from them: up to 15 minutes at Permit (maxTimeout in pkg/scheduler/framework/runtime/framework.go,
	// 1.37), and 10 minutes in PreBind of VolumeBinding (SetDefaults_VolumeBindingArgs in
	// pkg/scheduler/apis/config/v1/defaults.go). Until then, a pod that is nominated for the node
	// without an allocation keeps all devices in DRA.
	decisionTime = 25 * time.Minute

	// answerValidity is how long an answer of the API server holds while requests fail. A single failed
	// request does not undo a withdrawal.
	answerValidity = 2 * time.Minute
)

// stillAllocatable is the obstacle of a withdrawal whose time is not over.
const stillAllocatable = "claims that the scheduler may still allocate"

// withdrawals determines which physical devices no claim can get by DRA any more. A claim that is
// allocated a device after the device was withdrawn is still prepared; see [Placement.OfDRA].
//
// The requests to the API server concern the node only, so their size does not depend on the
// cluster: the node's slices, and, when the time of a withdrawal is over, the node's pods and the
// claims of these pods. The API server itself compares the nominations of all pods in its cache.
type withdrawals struct {
	cluster    *cluster.Node
	isPrepared func(claim types.UID) bool

	absentSince map[string]time.Time // by physical device: when an answer first lacked the device
	answer      *Published           // the last answer, nil if there was none
	waiting     map[string]bool      // physical devices that waited for the last request
	failingFrom time.Time            // time of the first failure since the last answer, zero if there was none
	nextRequest time.Time
	pause       wait.Backoff // until the next request, while the answers do not change
	failure     string       // the last logged error, "" after an answer
}

func newWithdrawals(node *cluster.Node, isPrepared func(claim types.UID) bool) *withdrawals {
	return &withdrawals{cluster: node, isPrepared: isPrepared, absentSince: make(map[string]time.Time), pause: backoff.NewPause()}
}

// published returns what keeps the waiting physical devices in DRA. isNew reports whether no API has
// offered a physical device yet, as far as the agent knows: if no slice names the device either, the
// device need not be withdrawn.
//
// An earlier answer is used again until the next request is due, if no further device waits since,
// such as one whose claim has ended. Only a new answer lets a device leave DRA.
func (w *withdrawals) published(ctx context.Context, s *rules.Snapshot, waiting map[string]bool, isNew func(silicon string) bool) *Published {
	now := time.Now()
	if w.answer != nil && now.Before(w.nextRequest) && w.answer.concerns(waiting) && !w.hasFurther(waiting) {
		return w.answer
	}
	w.waiting = maps.Clone(waiting)
	answer := w.request(ctx, s, waiting, isNew)
	if answer.Err != nil {
		w.nextRequest = now.Add(w.pause.Step())
		if answer.Err.Error() != w.failure {
			w.failure = answer.Err.Error()
			klog.FromContext(ctx).Info("Whether claims may still be allocated devices of this node is unknown; devices do not leave DRA until it is known", "reason", w.failure)
		}
		if w.failingFrom.IsZero() {
			w.failingFrom = now
		}
		if w.answer != nil && w.answer.Err == nil && now.Sub(w.failingFrom) < answerValidity && w.answer.concerns(waiting) {
			return w.answer
		}
		w.answer = answer
		return answer
	}
	if w.answer == nil || !maps.Equal(w.answer.BySilicon, answer.BySilicon) {
		w.pause = backoff.NewPause()
	}
	w.answer, w.failingFrom, w.failure = answer, time.Time{}, ""
	w.nextRequest = w.timeOfNext(now, answer, waiting)
	return answer
}

// hasFurther reports whether a device waits that did not wait for the last request.
func (w *withdrawals) hasFurther(waiting map[string]bool) bool {
	for silicon := range waiting {
		if !w.waiting[silicon] {
			return true
		}
	}
	return false
}

// request asks the API server.
func (w *withdrawals) request(ctx context.Context, s *rules.Snapshot, waiting map[string]bool, isNew func(silicon string) bool) *Published {
	offered, err := w.cluster.OfferedDevices(ctx)
	if err != nil {
		return &Published{Err: err}
	}
	answer := &Published{BySilicon: make(map[string]string)}
	for name, device := range offered {
		slice := "ResourceSlice " + device.Slice
		if silicon, found := pool.LookupSilicon(s, name); found {
			answer.BySilicon[silicon] = slice
			continue
		}
		// A capacity that includes waiting devices precedes their withdrawal.
		if alike, left := interchangeable(s, name, waiting); device.Shares > left {
			answer.addAll(alike, slice)
		}
	}
	now, over := time.Now(), false
	for silicon := range waiting {
		if answer.BySilicon[silicon] != "" {
			delete(w.absentSince, silicon)
			continue
		}
		if _, known := w.absentSince[silicon]; !known {
			w.absentSince[silicon] = now
			if isNew(silicon) {
				w.absentSince[silicon] = now.Add(-decisionTime)
			}
		}
		if now.Sub(w.absentSince[silicon]) < WithdrawalTime {
			answer.BySilicon[silicon] = stillAllocatable
		} else {
			over = true
		}
	}
	if !over {
		return answer
	}
	claimed, undecided, err := w.cluster.ClaimedDevices(ctx)
	if err != nil {
		return &Published{Err: err}
	}
	if undecided != "" {
		w.keepUndecided(answer, waiting, "the choice of the scheduler for pod "+undecided, now)
	}
	for _, name := range slices.Sorted(maps.Keys(claimed)) {
		silicon, found := pool.LookupSilicon(s, name)
		alike, _ := interchangeable(s, name, waiting)
		for _, claim := range claimed[name] {
			object := fmt.Sprintf("ResourceClaim %s/%s", claim.Namespace, claim.Name)
			switch {
			case found:
				answer.BySilicon[silicon] = object
			case !w.isPrepared(claim.UID): // a prepared claim has its devices in the ledger
				answer.addAll(alike, object)
			}
		}
	}
	return answer
}

// keepUndecided keeps the devices in DRA whose slices the scheduler may have used for a decision that
// it has not stored yet.
func (w *withdrawals) keepUndecided(answer *Published, waiting map[string]bool, why string, now time.Time) {
	for silicon := range waiting {
		if answer.BySilicon[silicon] == "" && now.Sub(w.absentSince[silicon]) < decisionTime {
			answer.BySilicon[silicon] = why
		}
	}
}

// addAll adds an object that may lead to an allocation of any of the physical devices.
func (p *Published) addAll(silicon []string, object string) {
	for _, name := range silicon {
		p.BySilicon[name] = object
	}
}

// interchangeable returns the waiting physical devices of a common name, and the number of the other
// devices of that name.
func interchangeable(s *rules.Snapshot, name string, waiting map[string]bool) (found []string, others int64) {
	for _, d := range pool.LookupInterchangeable(s, name) {
		if waiting[d.Silicon()] {
			found = append(found, d.Silicon())
		} else {
			others++
		}
	}
	return found, others
}

// timeOfNext returns the time of the next request after an answer. While devices only wait for the
// end of their withdrawals, that is the end of the first one.
func (w *withdrawals) timeOfNext(now time.Time, answer *Published, waiting map[string]bool) time.Time {
	first := now.Add(WithdrawalTime)
	for silicon := range waiting {
		switch since := w.absentSince[silicon]; {
		case answer.BySilicon[silicon] == "":
		case answer.BySilicon[silicon] != stillAllocatable:
			return now.Add(w.pause.Step())
		case since.Add(WithdrawalTime).Before(first):
			first = since.Add(WithdrawalTime)
		}
	}
	return first.Add(rand.N(WithdrawalTime / 10)) // spread the requests of many nodes
}

// forgetOffered forgets the withdrawals of the physical devices that DRA offers again. withheld has
// the physical devices that DRA does not offer.
func (w *withdrawals) forgetOffered(withheld map[string]string) {
	maps.DeleteFunc(w.absentSince, func(silicon string, _ time.Time) bool { return withheld[silicon] == "" })
}

// hurry makes the next request due, because an administrator has changed what the agent wants.
func (w *withdrawals) hurry() { w.nextRequest, w.pause = time.Time{}, backoff.NewPause() }
