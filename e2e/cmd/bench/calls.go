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

// timings are the durations of repeated runs of one operation.
type timings []time.Duration

// percentile returns the duration within which the given percentage of runs ended.
func (t timings) percentile(percent int) time.Duration {
	if len(t) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(t))
	// The nearest rank: with fewer than 100 timings, the 99th percentile is the longest one.
	return sorted[max(0, (len(sorted)*percent+99)/100-1)]
}

func (t timings) p50() time.Duration { return t.percentile(50) }

// milliseconds formats a duration for tables, with three digits.
func milliseconds(d time.Duration) string {
	ms := float64(d) / float64(time.Millisecond)
	switch {
	case ms < 10:
		return fmt.Sprintf("%.2f", ms)
	case ms < 100:
		return fmt.Sprintf("%.1f", ms)
	}
	return fmt.Sprintf("%.0f", ms)
}

// String returns the 50th and the 99th percentile, or "" without timings.
func (t timings) String() string {
	if len(t) == 0 {
		return ""
	}
	return milliseconds(t.p50()) + " / " + milliseconds(t.percentile(99))
}

// prepare prepares claims in one call.
func (r *running) prepare(ctx context.Context, claims []*drapb.Claim) error {
	answer, err := r.client.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		return fmt.Errorf("%s: prepare: %w", r.name, err)
	}
	for _, claim := range claims {
		switch result := answer.GetClaims()[claim.GetUid()]; {
		case result == nil:
			return fmt.Errorf("%s: prepare claim %s: no answer", r.name, claim.GetName())
		case result.GetError() != "":
			return fmt.Errorf("%s: %s", r.name, result.GetError())
		case len(result.GetDevices()) == 0:
			return fmt.Errorf("%s: prepare claim %s: no devices", r.name, claim.GetName())
		}
	}
	return nil
}

// unprepare unprepares claims in one call.
func (r *running) unprepare(ctx context.Context, claims []*drapb.Claim) error {
	answer, err := r.client.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: claims})
	if err != nil {
		return fmt.Errorf("%s: unprepare: %w", r.name, err)
	}
	for _, claim := range claims {
		if result := answer.GetClaims()[claim.GetUid()]; result.GetError() != "" {
			return errors.New(r.name + ": " + result.GetError())
		}
	}
	return nil
}

// A load describes how claims arrive at an agent.
type load struct {
	name    string
	claims  int // per call
	devices int // per claim
	calls   int // concurrent calls
	times   int // repetitions per round

	kept bool // Prepare all claims one after another before unpreparing the first.
}

// timed applies a load once and returns the time until all calls were answered. The claims must
// suffice for one application of the load.
func (l *load) timed(ctx context.Context, claims []*drapb.Claim, call func(context.Context, []*drapb.Claim) error) (time.Duration, error) {
	group, ctx := errgroup.WithContext(ctx)
	began := time.Now()
	for part := range slices.Chunk(claims[:l.calls*l.claims], l.claims) {
		group.Go(func() error { return call(ctx, part) })
	}
	err := group.Wait()
	return time.Since(began), err
}

// A measurement holds the timings of one agent under one load.
type measurement struct {
	prepare, unprepare timings
}

// once prepares and unprepares claims of the load, and records both durations.
func (m *measurement) once(ctx context.Context, l *load, r *running, claims []*drapb.Claim) error {
	if l.kept {
		return m.onceKept(ctx, l, r, claims)
	}
	took, err := l.timed(ctx, claims, r.prepare)
	if err != nil {
		return err
	}
	m.prepare = append(m.prepare, took)
	if took, err = l.timed(ctx, claims, r.unprepare); err != nil {
		return err
	}
	m.unprepare = append(m.unprepare, took)
	return nil
}

// onceKept prepares all claims one after another, then unprepares them, and records the duration of
// each call.
func (m *measurement) onceKept(ctx context.Context, l *load, r *running, claims []*drapb.Claim) error {
	for i := range claims {
		took, err := l.timed(ctx, claims[i:], r.prepare)
		if err != nil {
			return err
		}
		m.prepare = append(m.prepare, took)
	}
	for i := range claims {
		took, err := l.timed(ctx, claims[i:], r.unprepare)
		if err != nil {
			return err
		}
		m.unprepare = append(m.unprepare, took)
	}
	return nil
}
