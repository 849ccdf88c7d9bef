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

// sweepInterval is about how often it is asked which claims nobody has any more.
const sweepInterval = 10 * time.Minute

// Abandoned returns which of the claims nobody has any more and nobody will
// ask to unprepare: those that are gone from the API server, or are not
// allocated on this node any more, and that no pod of the node and no container
// that its kubelet knows refers to. A claim whose record cannot be read has no
// namespace and no name.
type Abandoned func(ctx context.Context, claims []ledger.Owner) ([]types.UID, error)

// sweepLoop lets go of claims that the kubelet has forgotten, as one does whose
// state was lost. Twice in a row such a claim must have been found: the kubelet
// may be about to unprepare it.
func (d *Driver) sweepLoop(ctx context.Context) {
	suspects := make(map[types.UID]bool)
	for {
		// Not all nodes of a cluster are to ask at the same time.
		pause := sweepInterval*3/4 + rand.N(sweepInterval/2)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
			suspects = d.sweep(ctx, suspects)
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
