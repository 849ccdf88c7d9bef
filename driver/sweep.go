package driver

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/internal/ledger"
)

const (
	// sweepInterval is about how often it is asked which claims nobody has any more.
	sweepInterval = 10 * time.Minute
	// soonInterval is about how long until that is asked again of claims that nobody seems to have, of those
	// whose records cannot be read, and once another claim was refused: others wait for their devices. It is longer
	// than the kubelet needs to look for claims of pods that have ended (pkg/kubelet/cm/dra/manager.go,
	// defaultReconcilePeriod, 60 s in 1.31 to 1.37).
	soonInterval = 2 * time.Minute
	// soonRounds is how often, after the start, that is asked soon of claims whose records cannot be read. The
	// kubelet or the API server may not answer at first.
	soonRounds = 3
)

// Abandoned returns which of the claims nobody has any more and nobody will
// ask to unprepare: those that are gone from the API server, or are not
// allocated on this node any more, and that no pod of the node and no container
// that its kubelet knows refers to. A claim whose record cannot be read has no
// namespace and no name.
type Abandoned func(ctx context.Context, claims []ledger.Owner) ([]types.UID, error)

// sweepLoop lets go of claims that the kubelet has forgotten. One whose state was lost does, and one to 1.36 that has
// unprepared a claim for one pod while it prepared it for another (unprepareResources in the same file, 1.34 to 1.36;
// setUnpreparing keeps these apart in 1.37). Twice in a row such a claim must have been found: the kubelet may be about
// to unprepare it.
func (d *Driver) sweepLoop(ctx context.Context) {
	suspects := make(map[types.UID]bool)
	for round := 0; ; round++ {
		about := sweepInterval
		if len(suspects) > 0 || round < soonRounds && len(d.ledger.View(nil).Sealed()) > 0 {
			about = soonInterval
		}
		if !d.pauseSweep(ctx, about) {
			return
		}
		suspects = d.sweep(ctx, suspects)
	}
}

// pauseSweep returns when it is time to sweep, false if the context ends before.
func (d *Driver) pauseSweep(ctx context.Context, about time.Duration) bool {
	// Not all nodes of a cluster are to ask at the same time.
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
		case <-d.refused:
			timer.Stop()
			if soon := pause(soonInterval); soon.Before(until) {
				until = soon
			}
		}
	}
}

// sweep unprepares the abandoned claims that were suspects before, and returns
// the suspects for the next time.
func (d *Driver) sweep(ctx context.Context, before map[types.UID]bool) map[types.UID]bool {
	logger := klog.FromContext(ctx)
	claims := d.ledger.Owed()
	if len(claims) == 0 {
		return nil
	}
	byUID := make(map[types.UID]ledger.Owner, len(claims))
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
		logger.Info("Let go of a claim that is gone from this node and that no pod refers to", "uid", uid)
	}
	return suspects
}

// sweepAway unprepares an abandoned claim, unless somebody has it again since it
// was asked: while its lock is held, nobody prepares it. It waits for it no
// longer than a call does: one whose devices are being configured does not keep
// the others.
func (d *Driver) sweepAway(ctx context.Context, claim ledger.Owner) (gone bool, err error) {
	ctx, cancel := inTime(ctx)
	defer cancel()
	unlock, err := d.ledger.Lock(ctx, string(claim.UID))
	if err != nil {
		return false, fmt.Errorf("wait for a call for the claim: %w", err)
	}
	defer unlock()
	abandoned, err := d.config.Abandoned(ctx, []ledger.Owner{claim})
	if err != nil {
		return false, fmt.Errorf("ask again whether the claim is abandoned: %w", err)
	}
	if !slices.Contains(abandoned, claim.UID) {
		return false, nil
	}
	err = d.letGo(ctx, claim.UID)
	return err == nil, err
}
