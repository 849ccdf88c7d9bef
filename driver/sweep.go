package driver

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/internal/ledger/allocation"
)

const (
	// sweepInterval is the approximate interval of the search for abandoned claims.
	sweepInterval = 10 * time.Minute
	// soonInterval is the approximate interval while a claim seems abandoned or a record cannot be
	// read, and after a claim was refused, since pods may be waiting for the devices. It is longer
	// than the kubelet's interval for unpreparing claims of ended pods
	// (pkg/kubelet/cm/dra/manager.go, defaultReconcilePeriod, 60 s in 1.31 to 1.37).
	soonInterval = 2 * time.Minute
	// soonRounds is the number of searches at soonInterval after the start for claims with
	// unreadable records. The kubelet or the API server may not answer at first.
	soonRounds = 3
)

// Abandoned returns the claims without a consumer that the kubelet will not unprepare. Such a claim
// is deleted from the API server or no longer allocated on this node, and no pod of the node and no
// container in the kubelet's list refers to it. A claim with an unreadable record has neither
// namespace nor name.
type Abandoned func(ctx context.Context, claims []allocation.Owner) ([]types.UID, error)

// sweepLoop releases claims that the kubelet has forgotten. A kubelet forgets claims when its state
// is lost. Up to 1.36, it also forgets a claim that it unprepares for one pod while preparing it
// for another (unprepareResources in the same file, 1.34 to 1.36; setUnpreparing separates these in
// 1.37). A claim must be found abandoned twice in a row, since the kubelet may be about to
// unprepare it.
func (d *Driver) sweepLoop(ctx context.Context) {
	suspects := make(map[types.UID]bool)
	for round := 0; ; round++ {
		about := sweepInterval
		if len(suspects) > 0 || round < soonRounds && len(d.ledger.View(nil).SealedEntries()) > 0 {
			about = soonInterval
		}
		if !d.pauseSweep(ctx, about) {
			return
		}
		suspects = d.unprepareAbandoned(ctx, suspects)
	}
}

// pauseSweep returns true when it is time to sweep, and false if the context ends before.
func (d *Driver) pauseSweep(ctx context.Context, about time.Duration) bool {
	// The nodes of a cluster should not search at the same time.
	pause := func(about time.Duration) time.Time { return time.Now().Add(about*3/4 + rand.N(about/2)) }
	until := pause(about)
	for {
		timer := time.NewTimer(time.Until(until))
		select {
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-timer.C:
			return true
		case <-d.claimRefused:
			timer.Stop()
			if soon := pause(soonInterval); soon.Before(until) {
				until = soon
			}
		}
	}
}

// unprepareAbandoned unprepares the abandoned claims that were already suspects, and returns the
// suspects for the next search.
func (d *Driver) unprepareAbandoned(ctx context.Context, before map[types.UID]bool) map[types.UID]bool {
	logger := klog.FromContext(ctx)
	claims := d.ledger.AllOwners()
	if len(claims) == 0 {
		return nil
	}
	byUID := make(map[types.UID]allocation.Owner, len(claims))
	for _, claim := range claims {
		byUID[claim.UID] = claim
	}
	abandoned, err := d.config.Abandoned(ctx, claims)
	if err != nil {
		logger.V(2).Info("Whether claims were abandoned cannot be found out; all are kept", "reason", err.Error())
		return before
	}
	suspects := make(map[types.UID]bool)
	for _, uid := range abandoned {
		if !before[uid] {
			suspects[uid] = true
			continue
		}
		gone, err := d.sweepAway(ctx, byUID[uid])
		if err != nil {
			logger.Error(err, "Letting go of an abandoned claim", "uid", uid)
			suspects[uid] = true
		}
		if !gone {
			continue
		}
		logger.Info("Released a claim that is gone from this node and that no pod refers to", "uid", uid)
	}
	return suspects
}

// sweepAway unprepares an abandoned claim, unless the claim has a consumer again. It holds the
// claim's lock, so that the claim cannot be prepared at the same time. sweepAway waits for the lock
// no longer than a call would, so that a claim under configuration does not delay the others.
func (d *Driver) sweepAway(ctx context.Context, claim allocation.Owner) (gone bool, err error) {
	ctx, cancel := inTime(ctx)
	defer cancel()
	unlock, err := d.ledger.Lock(ctx, string(claim.UID))
	if err != nil {
		return false, fmt.Errorf("wait for a call for the claim: %w", err)
	}
	defer unlock()
	abandoned, err := d.config.Abandoned(ctx, []allocation.Owner{claim})
	if err != nil {
		return false, fmt.Errorf("check again whether the claim is abandoned: %w", err)
	}
	if !slices.Contains(abandoned, claim.UID) {
		return false, nil
	}
	err = d.claims.letGo(ctx, claim.UID)
	return err == nil, err
}
