package publish

import (
	"errors"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/backoff"
)

// The next step depends only on its state and the time.
func TestSchedule(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	of := func(devices ...rules.Offered) *resourceslice.DriverResources {
		p, _ := pool.BuildPools(pool.Input{Node: "node", Snapshot: &rules.Snapshot{Devices: devices}, Features: features.All()})
		return &p
	}
	one, two := of(gpu("a")), of(gpu("b"))
	parts := of(gpu("a"), pooltest.PartDevice("g0", "g0", 7), pooltest.PartDevice("g0", "g0-a", 3))
	later := now.Add(time.Hour)
	tests := map[string]struct {
		schedule
		want  step
		after time.Duration // how long to wait
	}{
		"the server is asked first":                {want: detect},
		"before there is anything to publish":      {schedule: schedule{wanted: one}, want: detect},
		"a silent server is asked again":           {schedule: schedule{wanted: one, nextDetection: later, retryDetection: now}, want: detect},
		"but not at once":                          {schedule: schedule{wanted: one, nextDetection: later, retryDetection: now.Add(2 * time.Second)}, want: idle, after: 2 * time.Second},
		"no scan yet":                              {schedule: schedule{nextDetection: later, featuresKnown: true}, want: idle, after: time.Hour},
		"the first pool":                           {schedule: schedule{wanted: parts, nextDetection: later, featuresKnown: true}, want: publish},
		"the same pool":                            {schedule: schedule{wanted: of(gpu("a")), last: one, nextDetection: later, featuresKnown: true}, want: idle, after: time.Hour},
		"another pool":                             {schedule: schedule{wanted: two, last: one, nextDetection: later, featuresKnown: true}, want: publish},
		"another pool, while the server is to say": {schedule: schedule{wanted: two, last: one, nextDetection: later}, want: detect},
		"the server is asked now and then":         {schedule: schedule{wanted: one, last: one, nextDetection: now, featuresKnown: true}, want: detect},
		"what changes by itself":                   {schedule: schedule{wanted: one, last: one, nextDetection: later, featuresKnown: true, nextChange: now.Add(time.Minute)}, want: idle, after: time.Minute},
		"devices that compete anew":                {schedule: schedule{wanted: parts, last: one, nextDetection: later, featuresKnown: true}, want: detect},
		"while the server is silent": {
			schedule: schedule{wanted: parts, last: one, nextDetection: later, featuresKnown: true, retryDetection: now.Add(2 * time.Second)},
			want:     idle, after: 2 * time.Second,
		},
		"once it has confirmed":          {schedule: schedule{wanted: parts, last: one, nextDetection: later, featuresKnown: true, featuresConfirmed: true}, want: publish},
		"devices that competed before":   {schedule: schedule{wanted: parts, last: parts, nextDetection: later, featuresKnown: true}, want: idle, after: time.Hour},
		"a registration before any pool": {schedule: schedule{nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-time.Second)}, want: idle, after: time.Hour},
		"a second after a registration":  {schedule: schedule{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-time.Second), lastPublication: now.Add(-time.Minute)}, want: publish},
		"then two seconds later":         {schedule: schedule{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-time.Second), lastPublication: now}, want: idle, after: 2 * time.Second},
		"then four":                      {schedule: schedule{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-3 * time.Second), lastPublication: now}, want: idle, after: 4 * time.Second},
		"then eight":                     {schedule: schedule{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-7 * time.Second), lastPublication: now}, want: idle, after: 8 * time.Second},
		"a write that failed":            {schedule: schedule{wanted: one, last: one, nextDetection: later, featuresKnown: true, firstFailure: now.Add(-time.Second)}, want: idle, after: retryAfter - time.Second},
		"after a while":                  {schedule: schedule{wanted: one, last: one, nextDetection: later, featuresKnown: true, firstFailure: now.Add(-retryAfter)}, want: publish},
		"and a registration": {
			schedule: schedule{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-time.Second), lastPublication: now, firstFailure: now.Add(time.Second - retryAfter)},
			want:     idle, after: time.Second,
		},
		"and no more": {schedule: schedule{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-15 * time.Second), lastPublication: now}, want: idle, after: time.Hour},
	}
	waiting := schedule{wanted: parts, last: one, nextDetection: later, featuresKnown: true, retryDetection: now.Add(2 * time.Second), firstFailure: now.Add(-retryAfter)}
	if do, _ := waiting.next(now); do != publish || waiting.nextPools() != one {
		t.Errorf("%s %v while the server is silent, want what it has once more", do, waiting.nextPools())
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			do, until := test.next(now)
			if do != test.want || do == idle && until.Sub(now) != test.after {
				t.Errorf("%s for %s, want %s for %s", do, until.Sub(now), test.want, test.after)
			}
		})
	}
}

// The publisher waits for a server that does not answer, but not for a server that refuses for
// long.
func TestPublisherHears(t *testing.T) {
	began := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	silence, refusal := errors.New("no route"), apierrors.NewForbidden(schema.GroupResource{}, "", nil)
	one := &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{"node": {Slices: []resourceslice.Slice{{}}}}}
	tests := map[string]struct {
		heard                            bool
		err                              error
		after                            time.Duration
		wantHeard, confirmed, wantSilent bool
	}{
		"an answer":          {wantHeard: true, confirmed: true},
		"silence":            {err: silence, wantSilent: true},
		"a long silence":     {err: silence, after: time.Hour, wantSilent: true},
		"silence later":      {heard: true, err: silence, wantHeard: true, wantSilent: true},
		"a refusal":          {err: refusal, wantSilent: true},
		"a refusal for long": {err: refusal, after: refusalPause, wantHeard: true, confirmed: true},
		"a refusal later":    {heard: true, err: refusal, wantHeard: true, confirmed: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := &schedule{startTime: began, featuresKnown: test.heard, wanted: one, retryPause: backoff.NewPause()}
			now := began.Add(test.after)
			p.recordDetection(test.err, now, time.Minute)
			if p.featuresKnown != test.wantHeard || p.featuresConfirmed != test.confirmed || p.retryDetection.IsZero() == test.wantSilent || !p.nextDetection.Equal(now.Add(time.Minute)) {
				t.Errorf("%+v", p)
			}
		})
	}
	p := &schedule{startTime: began, wanted: one, last: one}
	if p.recordDetection(nil, began, time.Minute); p.featuresConfirmed {
		t.Error("confirmed, and nothing is to be published")
	}
}
