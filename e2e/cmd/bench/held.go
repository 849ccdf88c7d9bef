package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// heldClaims is the number of claims that stay prepared while other claims are measured.
const heldClaims = 1000

// atOnceClaims is the number of other claims that arrive at once.
const atOnceClaims = 100

// heldLoads are the loads that are measured while other claims stay prepared.
var heldLoads = []*load{
	{name: "1 claim", claims: 1, devices: 1, calls: 1, times: 40},
	{name: "1 claim with 8 devices", claims: 1, devices: 8, calls: 1, times: 15},
	{name: "100 calls at once, 1 claim each", claims: 1, devices: 1, calls: atOnceClaims, times: 3},
	{name: "1 call with 100 claims", claims: atOnceClaims, devices: 1, calls: 1, times: 3},
}

// measureHeld measures whether calls take longer while other claims are prepared, and the time
// until a new agent has prepared a claim with all these claims on record. Chandler allocates a
// device to one claim only, so each claim needs a device of its own.
func (b *bench) measureHeld(ctx context.Context) error {
	devices := heldClaims + atOnceClaims
	if err := b.simulate(devices, 0); err != nil {
		return err
	}
	agents := []*agent{
		b.chandlerAgent("Chandler, no metadata", devices, append(liftedLimit, withoutMetadata)...),
		b.chandlerAgent("Chandler", devices, liftedLimit...),
		// The example driver publishes at most 128 devices, and does not check for claims that
		// share one.
		b.exampleAgent("example driver", comparedDevices, liftedLimit...),
	}
	held, err := b.claimsOf(ctx, agents, "held", heldClaims, 1)
	if err != nil {
		return err
	}
	sets := make(map[*load]map[*agent][]*drapb.Claim)
	for i, l := range heldLoads {
		sets[l] = make(map[*agent][]*drapb.Claim)
		made := make(map[string][]*drapb.Claim)
		for _, a := range agents {
			if made[a.driver] == nil {
				if made[a.driver], err = b.newClaims(ctx, a, fmt.Sprint("beside-", i), heldClaims, atOnceClaims/l.devices, l.devices); err != nil {
					return err
				}
			}
			sets[l][a] = made[a.driver]
		}
	}
	without, with, restarts := newResults(), newResults(), make(map[*agent]*[2]timings)
	for round := range b.rounds {
		b.say("round %d of %d", round+1, b.rounds)
		for _, a := range agents {
			if restarts[a] == nil {
				restarts[a] = &[2]timings{}
			}
			if err := b.measureHolding(ctx, a, held[a], sets, without, with, restarts[a]); err != nil {
				return err
			}
		}
	}
	prepared := func(m *measurement) timings { return m.prepare }
	unprepared := func(m *measurement) timings { return m.unprepare }
	b.comparison("Prepare with no other claim held, p50 / p99 in ms, the limits of clients lifted:", heldLoads, agents, without, prepared)
	b.comparison(fmt.Sprintf("Prepare with %d other claims held:", heldClaims), heldLoads, agents, with, prepared)
	b.comparison("Unprepare with no other claim held:", heldLoads, agents, without, unprepared)
	b.comparison(fmt.Sprintf("Unprepare with %d other claims held:", heldClaims), heldLoads, agents, with, unprepared)
	var rows [][]string
	for _, a := range agents {
		rows = append(rows, []string{a.name, restarts[a][0].String(), restarts[a][1].String()})
	}
	b.table("From the start of a new agent until it has prepared a claim, p50 / p99 in ms:", []string{"", "no claim held", fmt.Sprintf("%d held", heldClaims)}, rows)
	if err := b.done(ctx, agents, held); err != nil {
		return err
	}
	for _, l := range heldLoads {
		if err := b.done(ctx, agents, sets[l]); err != nil {
			return err
		}
	}
	return nil
}

// measureHolding measures one agent without and with other claims prepared, each time after a
// restart.
func (b *bench) measureHolding(ctx context.Context, a *agent, held []*drapb.Claim, sets map[*load]map[*agent][]*drapb.Claim, without, with results, restarts *[2]timings) (err error) {
	r, err := b.start(ctx, a)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.stop(), b.forget(ctx, a)) }()
	for i, into := range []results{without, with} {
		if i == 1 {
			if err := all(ctx, held, r.prepare); err != nil {
				return err
			}
		}
		one := sets[heldLoads[0]][a][:1]
		var took time.Duration
		if r, took, err = b.restart(ctx, r, one); err != nil {
			return err
		}
		restarts[i] = append(restarts[i], took)
		if err := r.unprepare(ctx, one); err != nil {
			return err
		}
		for _, l := range heldLoads {
			for time := range l.times {
				if err := into.of(l, a).once(ctx, l, r, rotated(sets[l][a], time)); err != nil {
					return fmt.Errorf("%s: %w", l.name, err)
				}
			}
		}
	}
	return all(ctx, held, r.unprepare)
}

// restart ends an agent and starts it again. It returns the time from the start until the new
// process has prepared a claim.
func (b *bench) restart(ctx context.Context, r *running, claim []*drapb.Claim) (*running, time.Duration, error) {
	if err := r.stop(); err != nil {
		return r, 0, err
	}
	began := time.Now()
	next, err := b.launch(ctx, r.agent)
	if err != nil {
		return r, 0, err
	}
	err = next.until(ctx, "an answer", func(ctx context.Context) error { return next.prepare(ctx, claim) })
	return next, time.Since(began), err
}

// all calls the agent for many claims, 50 in each call and atOnce calls at a time.
func all(ctx context.Context, claims []*drapb.Claim, call func(context.Context, []*drapb.Claim) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for part := range slices.Chunk(claims, 50) {
		group.Go(func() error { return call(ctx, part) })
	}
	return group.Wait()
}
