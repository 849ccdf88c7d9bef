package handover

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/ledger"
)

// askAll asks for which pods claims are, without waiting for the API server.
func (c *Custodian) askAll(ctx context.Context, claims []*ledger.Claim) {
	if c.config.Users == nil || c.config.Reserved == nil {
		return
	}
	claims = slices.DeleteFunc(claims, func(claim *ledger.Claim) bool { return !c.unknown(claim) })
	if len(claims) == 0 || !c.asking.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer c.asking.Store(false)
		for _, claim := range claims {
			if ctx.Err() == nil {
				c.ask(ctx, claim)
			}
		}
	}()
}

// unknown reports whether more pods have a claim than are known, and it is time to ask which.
func (c *Custodian) unknown(claim *ledger.Claim) bool {
	users := c.config.Users(claim.Owner())
	c.mu.Lock()
	defer c.mu.Unlock()
	known, noted := c.known(claim.UID)
	at, asked := c.asked[claim.UID]
	return noted && users > len(known) && (!asked || time.Since(at) >= askInterval)
}

// ask asks for which pods a claim is. [Custodian.refresh] writes that down.
func (c *Custodian) ask(ctx context.Context, claim *ledger.Claim) {
	pods := c.config.Reserved(ctx, claim.Owner())
	users := c.config.Users(claim.Owner())
	c.mu.Lock()
	defer c.mu.Unlock()
	known, noted := c.known(claim.UID)
	if !noted {
		return // it has ended meanwhile
	}
	c.reserved[claim.UID] = union(known, pods)
	delete(c.asked, claim.UID)
	if users > len(c.reserved[claim.UID]) {
		c.asked[claim.UID] = time.Now()
	}
}

// known returns the pods of a claim, and whether it is written down that it has a device. The caller
// has the lock.
func (c *Custodian) known(claim types.UID) (pods []types.UID, noted bool) {
	pods = c.reserved[claim]
	for _, r := range c.records {
		if r.Owner.UID == claim {
			pods, noted = union(pods, r.Pods), noted || !r.Ended
		}
	}
	return pods, noted
}
