package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"chandler.dev/e2e/chandler"
)

// measureEarlier compares the agent with an earlier version, without metadata and without request
// limits. Only one agent of a driver runs at a time, so the versions alternate within each round.
func (b *bench) measureEarlier(ctx context.Context) error {
	program, err := chandler.BuildEarlier(ctx, b.project.Dir, chandler.Earlier)
	if errors.Is(err, chandler.ErrNoHistory) {
		b.say("left out: %v", err)
		return nil
	}
	if err != nil {
		return err
	}
	earlier := b.chandlerAgent("agent of "+chandler.Earlier, comparedDevices, append(liftedLimit, withoutMetadata)...)
	earlier.program = program
	present := b.chandlerAgent("present agent", comparedDevices, append(liftedLimit, withoutMetadata)...)
	if err := b.simulate(comparedDevices, 0); err != nil {
		return err
	}
	agents, l := []*agent{earlier, present}, comparedLoads[0]
	sets, err := b.claimsOf(ctx, agents, "earlier", comparedDevices, 1)
	if err != nil {
		return err
	}
	results, gets, stages := newResults(), timings{}, make(map[*agent]*sum)
	for round := range b.rounds {
		b.say("round %d of %d", round+1, b.rounds)
		for _, a := range agents {
			took, err := b.measureAlone(ctx, a, l, sets[a], results.of(l, a))
			if err != nil {
				return err
			}
			stages[a] = cmp.Or(stages[a], new(sum))
			stages[a].add(took)
		}
		got, err := b.get(ctx, sets[present][0], 50)
		if err != nil {
			return err
		}
		gets = append(gets, got...)
	}
	var rows [][]string
	for _, a := range agents {
		m := results.of(l, a)
		rows = append(rows, []string{a.name, m.prepare.String(), milliseconds(m.prepare.p50() - gets.p50()), milliseconds(stages[a].mean()), m.unprepare.String()})
	}
	b.table(fmt.Sprintf("1 claim, p50 / p99 in ms; the library gets a claim in %s:", milliseconds(gets.p50())),
		[]string{"", "prepare", "without getting it", "the agent's own part, mean", "unprepare"}, rows)
	return b.done(ctx, agents, sets)
}

// measureAlone starts an agent, applies a load, and stops the agent. It returns the time that the
// agent itself reports for preparing claims.
func (b *bench) measureAlone(ctx context.Context, a *agent, l *load, claims []*drapb.Claim, m *measurement) (own sum, err error) {
	r, err := b.start(ctx, a)
	if err != nil {
		return sum{}, err
	}
	defer func() { err = errors.Join(err, r.stop(), b.forget(ctx, a)) }()
	var warm measurement // The first call connects.
	if err := warm.once(ctx, l, r, claims); err != nil {
		return sum{}, err
	}
	for i := range l.times {
		if err := m.once(ctx, l, r, rotated(claims, i)); err != nil {
			return sum{}, err
		}
	}
	return b.prepareStages(ctx)
}
