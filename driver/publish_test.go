package driver

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
)

// The publisher's next step depends only on its state and the time.
func TestPublisher(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	of := func(devices ...rules.Offered) *resourceslice.Pool {
		p, _ := pool.BuildPool(pool.Input{Snapshot: &rules.Snapshot{Devices: devices}, Features: features.All()})
		return &p
	}
	one, two := of(gpu("a", 1)), of(gpu("b", 2))
	parts := of(gpu("a", 1), pooltest.PartDevice("g0", "g0", 7), pooltest.PartDevice("g0", "g0-a", 3))
	later := now.Add(time.Hour)
	tests := map[string]struct {
		publisher
		want  step
		after time.Duration // how long to wait
	}{
		"the server is asked first":                {want: ask},
		"before there is anything to publish":      {publisher: publisher{wanted: one}, want: ask},
		"a silent server is asked again":           {publisher: publisher{wanted: one, nextDetection: later, retryDetection: now}, want: ask},
		"but not at once":                          {publisher: publisher{wanted: one, nextDetection: later, retryDetection: now.Add(2 * time.Second)}, want: idle, after: 2 * time.Second},
		"no scan yet":                              {publisher: publisher{nextDetection: later, featuresKnown: true}, want: idle, after: time.Hour},
		"the first pool":                           {publisher: publisher{wanted: parts, nextDetection: later, featuresKnown: true}, want: publish},
		"the same pool":                            {publisher: publisher{wanted: of(gpu("a", 1)), last: one, nextDetection: later, featuresKnown: true}, want: idle, after: time.Hour},
		"another pool":                             {publisher: publisher{wanted: two, last: one, nextDetection: later, featuresKnown: true}, want: publish},
		"another pool, while the server is to say": {publisher: publisher{wanted: two, last: one, nextDetection: later}, want: ask},
		"the server is asked now and then":         {publisher: publisher{wanted: one, last: one, nextDetection: now, featuresKnown: true}, want: ask},
		"what changes by itself":                   {publisher: publisher{wanted: one, last: one, nextDetection: later, featuresKnown: true, nextChange: now.Add(time.Minute)}, want: idle, after: time.Minute},
		"devices that compete anew":                {publisher: publisher{wanted: parts, last: one, nextDetection: later, featuresKnown: true}, want: ask},
		"while the server is silent": {
			publisher: publisher{wanted: parts, last: one, nextDetection: later, featuresKnown: true, retryDetection: now.Add(2 * time.Second)},
			want:      idle, after: 2 * time.Second,
		},
		"once it has confirmed":          {publisher: publisher{wanted: parts, last: one, nextDetection: later, featuresKnown: true, featuresConfirmed: true}, want: publish},
		"devices that competed before":   {publisher: publisher{wanted: parts, last: parts, nextDetection: later, featuresKnown: true}, want: idle, after: time.Hour},
		"a registration before any pool": {publisher: publisher{nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-time.Second)}, want: idle, after: time.Hour},
		"a second after a registration":  {publisher: publisher{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-time.Second), lastPublication: now.Add(-time.Minute)}, want: publish},
		"then two seconds later":         {publisher: publisher{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-time.Second), lastPublication: now}, want: idle, after: 2 * time.Second},
		"then four":                      {publisher: publisher{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-3 * time.Second), lastPublication: now}, want: idle, after: 4 * time.Second},
		"then eight":                     {publisher: publisher{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-7 * time.Second), lastPublication: now}, want: idle, after: 8 * time.Second},
		"a write that failed":            {publisher: publisher{wanted: one, last: one, nextDetection: later, featuresKnown: true, firstFailure: now.Add(-time.Second)}, want: idle, after: retryAfter - time.Second},
		"after a while":                  {publisher: publisher{wanted: one, last: one, nextDetection: later, featuresKnown: true, firstFailure: now.Add(-retryAfter)}, want: publish},
		"and a registration": {
			publisher: publisher{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-time.Second), lastPublication: now, firstFailure: now.Add(time.Second - retryAfter)},
			want:      idle, after: time.Second,
		},
		"and no more": {publisher: publisher{wanted: one, last: one, nextDetection: later, featuresKnown: true, lastRegistration: now.Add(-15 * time.Second), lastPublication: now}, want: idle, after: time.Hour},
	}
	waiting := publisher{wanted: parts, last: one, nextDetection: later, featuresKnown: true, retryDetection: now.Add(2 * time.Second), firstFailure: now.Add(-retryAfter)}
	if do, _ := waiting.next(now); do != publish || waiting.nextPool() != one {
		t.Errorf("%s %v while the server is silent, want what it has once more", do, waiting.nextPool())
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
	one := &resourceslice.Pool{Slices: []resourceslice.Slice{{}}}
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
			p := &publisher{startTime: began, featuresKnown: test.heard, wanted: one, retryPause: NewPause()}
			now := began.Add(test.after)
			p.recordDetection(test.err, now, time.Minute)
			if p.featuresKnown != test.wantHeard || p.featuresConfirmed != test.confirmed || p.retryDetection.IsZero() == test.wantSilent || !p.nextDetection.Equal(now.Add(time.Minute)) {
				t.Errorf("%+v", p)
			}
		})
	}
	p := &publisher{startTime: began, wanted: one, last: one}
	if p.recordDetection(nil, began, time.Minute); p.featuresConfirmed {
		t.Error("confirmed, and nothing is to be published")
	}
}

// The pool of thousands of devices is computed again only if its input has changed.
func TestPoolIsKeptWhileItsInputIsTheSame(t *testing.T) {
	b := newBench(t)
	d := b.start()
	b.open()
	snapshot := &rules.Snapshot{Devices: []rules.Offered{gpu("a", 1), gpu("b", 2)}}
	p := &publisher{}
	look := func(s *rules.Snapshot, withheld map[string]string) *resourceslice.Pool {
		d.Publish(s, withheld)
		d.refreshPublisher(p)
		return p.wanted
	}
	first := look(snapshot, nil)
	if look(snapshot, map[string]string{}) != first {
		t.Error("the pool is computed again although nothing has changed")
	}
	withheld := look(snapshot, map[string]string{"a": "another API offers it"})
	if withheld == first {
		t.Error("the pool is the same although a device is withheld")
	}
	if other := look(&rules.Snapshot{Devices: snapshot.Devices[:1]}, nil); other == withheld || len(other.Slices[0].Devices) != 1 {
		t.Error("the pool is the same although the devices have changed")
	}
	one := p.wanted
	all := features.All()
	d.features.Store(&all)
	if d.refreshPublisher(p); p.wanted == one {
		t.Error("the pool is the same although the API server keeps more")
	}
	p.last = p.wanted
	if d.refreshPublisher(p); p.wanted != p.last {
		t.Error("the published pool is not the wanted one")
	}
	written := *p.last
	d.lastPool.Store(&written)
	if d.refreshPublisher(p); p.wanted != &written || p.last != &written {
		t.Error("the devices of the published pool are still in memory beside those that the library has written")
	}
}
