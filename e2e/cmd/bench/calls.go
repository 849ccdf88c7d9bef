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

// timings are how long the same took several times.
type timings []time.Duration

// percentile returns the time within which so many of a hundred were done.
func (t timings) percentile(percent int) time.Duration {
	if len(t) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(t))
	return sorted[max(0, (len(sorted)*percent+99)/100-1)] // the nearest rank: of few, the longest is the 99th
}

func (t timings) p50() time.Duration { return t.percentile(50) }

// milliseconds writes a duration as tables have it, to three digits.
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

// String is the 50th and the 99th percentile, "" if nothing was timed.
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

// A load is how claims come to an agent.
type load struct {
	name    string
	claims  int // of each call
	devices int // of each claim
	calls   int // at once
	times   int // how often it is repeated in a round

	kept bool // all claims are prepared one after another before the first is unprepared
}

// timed does a load once, with claims enough for it, and returns how long it took until all calls were answered.
func (l *load) timed(ctx context.Context, claims []*drapb.Claim, call func(context.Context, []*drapb.Claim) error) (time.Duration, error) {
	group, ctx := errgroup.WithContext(ctx)
	began := time.Now()
	for part := range slices.Chunk(claims[:l.calls*l.claims], l.claims) {
		group.Go(func() error { return call(ctx, part) })
	}
	err := group.Wait()
	return time.Since(began), err
}

// A measurement is what was timed of one agent under one load.
type measurement struct {
	prepare, unprepare timings
}

// once prepares and unprepares claims of the load, and notes how long both took.
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

// onceKept prepares all claims one after another, then unprepares them, and notes how long each took.
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
