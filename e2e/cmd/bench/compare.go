package main

import (
	"context"
	"errors"
	"fmt"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// comparedLoads are the loads under which both drivers are compared, with 64 devices.
var comparedLoads = []*load{
	{name: "1 claim", claims: 1, devices: 1, calls: 1, times: 60},
	{name: "64 claims one after another, all kept", claims: 1, devices: 1, calls: 1, times: 1, kept: true},
	{name: "1 claim with 8 devices", claims: 1, devices: 8, calls: 1, times: 20},
	{name: "16 calls at once, 1 claim each", claims: 1, devices: 1, calls: 16, times: 6},
	{name: "1 call with 16 claims", claims: 16, devices: 1, calls: 1, times: 6},
}

// A pair is two agents that are measured in alternation, so that other work of the machine affects
// both alike.
type pair [2]*agent

// measureCalls compares the time from the first call of a load until all its calls are answered.
func (b *bench) measureCalls(ctx context.Context) error {
	if err := b.simulate(comparedDevices, 0); err != nil {
		return err
	}
	bare := b.chandlerAgent("Chandler, no metadata", comparedDevices, append(liftedLimit, withoutMetadata)...)
	full := b.chandlerAgent("Chandler", comparedDevices, liftedLimit...)
	lifted := b.exampleAgent("example driver", comparedDevices, liftedLimit...)
	ours := b.chandlerAgent("Chandler as it comes", comparedDevices)
	slow := b.exampleAgent("example driver as it comes", comparedDevices)
	slow.slow = true
	agents := []*agent{bare, full, lifted, ours, slow}
	sets := make(map[*load]map[*agent][]*drapb.Claim)
	for i, l := range comparedLoads {
		var err error
		if sets[l], err = b.claimsOf(ctx, agents, fmt.Sprint("calls-", i), comparedDevices/l.devices, l.devices); err != nil {
			return err
		}
	}
	results, gets := newResults(), timings{}
	for round := range b.rounds {
		b.say("round %d of %d", round+1, b.rounds)
		for _, p := range []pair{{bare, lifted}, {full, lifted}, {ours, slow}} {
			if err := b.measurePair(ctx, p, comparedLoads, sets, results); err != nil {
				return err
			}
		}
		got, err := b.get(ctx, sets[comparedLoads[0]][bare][0], 50)
		if err != nil {
			return err
		}
		gets = append(gets, got...)
	}
	b.comparison(fmt.Sprintf("Prepare with %d devices, p50 / p99 in ms, the limits of clients lifted unless as it comes:", comparedDevices), comparedLoads, agents, results, func(m *measurement) timings { return m.prepare })
	b.comparison("Unprepare:", comparedLoads, agents, results, func(m *measurement) timings { return m.unprepare })
	b.stages(results.of(comparedLoads[0], bare).prepare, results.of(comparedLoads[0], full).prepare, gets)
	for _, l := range comparedLoads {
		if err := b.done(ctx, agents, sets[l]); err != nil {
			return err
		}
	}
	return nil
}

// measurePair starts both agents, applies the loads to them in alternation, and stops them.
func (b *bench) measurePair(ctx context.Context, p pair, loads []*load, sets map[*load]map[*agent][]*drapb.Claim, results results) (err error) {
	var both [2]*running
	for i, a := range p {
		if both[i], err = b.start(ctx, a); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, both[i].stop(), b.forget(ctx, a)) }()
		var warm measurement // The first call connects.
		if err := warm.once(ctx, loads[0], both[i], sets[loads[0]][a]); err != nil {
			return err
		}
	}
	for _, l := range loads {
		for i := range l.times {
			for _, r := range both {
				claims := rotated(sets[l][r.agent], i)
				if r.slow && i*l.calls*l.claims >= slowClaims {
					continue
				}
				if r.slow && l.kept {
					claims = claims[:slowClaims]
				}
				if err := results.of(l, r.agent).once(ctx, l, r, claims); err != nil {
					return fmt.Errorf("%s: %w", l.name, err)
				}
			}
		}
	}
	return nil
}

// slowClaims is the number of claims of a load per round for an agent whose client waits 200 ms for
// each claim.
const slowClaims = 12

// rotated returns the claims in rotation, beginning with number i.
func rotated(claims []*drapb.Claim, i int) []*drapb.Claim {
	i %= len(claims)
	return append(claims[i:len(claims):len(claims)], claims[:i]...)
}

// results holds the measurement of each agent under each load.
type results map[*load]map[*agent]*measurement

func newResults() results { return make(results) }

func (r results) of(l *load, a *agent) *measurement {
	if r[l] == nil {
		r[l] = make(map[*agent]*measurement)
	}
	if r[l][a] == nil {
		r[l][a] = &measurement{}
	}
	return r[l][a]
}

// comparison prints a row for each load and a column for each agent.
func (b *bench) comparison(heading string, loads []*load, agents []*agent, results results, which func(*measurement) timings) {
	columns := []string{""}
	for _, a := range agents {
		columns = append(columns, a.name)
	}
	var rows [][]string
	for _, l := range loads {
		row := []string{l.name}
		for _, a := range agents {
			row = append(row, which(results.of(l, a)).String())
		}
		rows = append(rows, row)
	}
	b.table(heading, columns, rows)
}

// stages prints the parts of the time to prepare one claim, by medians. The parts are the library's
// first step, which is timed by itself; the metadata files; and the rest, which is the driver's own
// stages and the call itself.
func (b *bench) stages(bare, full, gets timings) {
	b.table("Of one claim's prepare, p50 in ms:", []string{"", "ms"}, [][]string{
		{"the library gets the claim from the API server (timed by itself)", milliseconds(gets.p50())},
		{"own stages, with the call itself", milliseconds(bare.p50() - gets.p50())},
		{"metadata files", milliseconds(full.p50() - bare.p50())},
	})
}
