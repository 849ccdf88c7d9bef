package discovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"

	"chandler.dev/discovery/sysfs"
)

// Watch is how a host is watched. Its zero value watches for ever, at the
// default interval, without kernel events.
type Watch struct {
	Host     *Host
	Families []*Family

	// Interval is the time between scans while the kernel reports nothing;
	// 0 means 30 s.
	Interval time.Duration

	// Hears reports whether the kernel's events reach Events, all that there are of the
	// host. Then a scan at the interval only looks at what has no events, such as
	// sensors and the nodes in /dev, and all the rest is looked at when an event comes,
	// when what was looked at has changed, and at every tenth interval. Nil means that
	// every scan looks at everything.
	Hears func() bool

	// Settle is how long the kernel must be silent before its first event is
	// answered with a scan; 0 means 20 ms, in which it says most of what there is
	// to say of one device. With each scan that follows soon after the last one the
	// time doubles, up to sixteen times as long, 320 ms: a storm of events is
	// answered by a handful of scans. Where the kernel is never silent, a scan
	// follows after ten times that time, but at most 2 s.
	Settle time.Duration

	// Patience is how long a family may take to answer; 0 means 10 s. The kernel
	// may never answer a read of a device that hangs.
	Patience time.Duration

	// Observe is told of each scan when it has ended. Optional.
	Observe func(Scanned)

	// Events reports kernel events, one value for each burst at least; see
	// [Listen]. It may be nil.
	Events <-chan struct{}
}

// Scanned is what became of a scan.
type Scanned struct {
	Took    time.Duration
	Late    []string // names of the families that have not answered in time, in order
	Hanging int      // reads of devices that have not ended
}

// Run scans now, whenever the kernel reports an event, and at the interval,
// and hands each snapshot to publish, which is called from one goroutine. A scan
// that finds nothing to have changed is not published. It returns when the context
// ends.
//
// A device that was described before and cannot be read for the moment keeps
// its last description with health Unknown; see [Merge].
//
// Families are read at the same time, and none waits for another. After Patience
// a scan goes on without the families that have not answered: all of their
// devices count as unreadable. If one read keeps a family from answering, the
// next scan follows at once, and the family is read again without the device
// that hangs. That device counts as unreadable until its read ends. Nothing is
// published before any family has answered.
func (w Watch) Run(ctx context.Context, publish func(*Snapshot)) {
	if w.Interval == 0 {
		w.Interval = 30 * time.Second
	}
	if w.Settle == 0 {
		w.Settle = 20 * time.Millisecond
	}
	s, pace := newScanner(w), pace{shortest: w.Settle}
	var complete time.Time // when the last scan of everything began
	for told := true; ctx.Err() == nil; told = w.wait(ctx, s.again, &pace) {
		began := time.Now()
		if !told && w.hears() && began.Sub(complete) < completeAfter*w.Interval && s.isQuiet(ctx) {
			if w.Observe != nil && ctx.Err() == nil {
				w.Observe(s.scanned(time.Since(began)))
			}
			continue
		}
		complete, s.traces = began, w.hears()
		snapshot, answered := s.scan(ctx)
		if w.Observe != nil && ctx.Err() == nil {
			w.Observe(s.scanned(time.Since(began)))
		}
		if answered && ctx.Err() == nil {
			publish(snapshot)
		}
	}
}

// completeAfter is after how many intervals everything is looked at although nothing
// was heard.
const completeAfter = 10

func (w Watch) hears() bool { return w.Hears != nil && w.Hears() }

// Once scans as Run does, until nothing more is to be found without what does not
// answer, and returns what it found. Problems name what has not answered. The
// error is that of the context, if that ends before.
func (w Watch) Once(ctx context.Context) (*Snapshot, error) {
	s := newScanner(w)
	for {
		snapshot, _ := s.scan(ctx)
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("scan: %w", err)
		}
		select {
		case <-s.again:
		default:
			return snapshot, nil
		}
	}
}

// wait returns when it is time for the next scan, and reports whether there is
// something to look for.
func (w Watch) wait(ctx context.Context, again <-chan struct{}, pace *pace) (told bool) {
	interval := time.NewTimer(w.Interval)
	defer interval.Stop()
	select {
	case <-ctx.Done():
	case <-interval.C:
		return false
	case <-again:
	case <-w.Events:
		pace.settle(ctx, w.Events)
	}
	return true
}

// pace is how fast events are answered.
type pace struct {
	shortest time.Duration // silence before the first of several scans
	silence  time.Duration // before the last one
	ended    time.Time     // when its events had settled
}

// How much longer the silence becomes, for how long the kernel may go on in units of
// it and at all, and after which time without events all begins anew.
const (
	maxSlower = 16
	maxSilent = 10
	maxStorm  = 2 * time.Second
	calm      = 2 * time.Second
)

// settle returns when the kernel has been silent for a while after an event, or has
// gone on for too long.
func (p *pace) settle(ctx context.Context, events <-chan struct{}) {
	p.silence = min(2*p.silence, maxSlower*p.shortest)
	if time.Since(p.ended) > calm || p.silence == 0 {
		p.silence = p.shortest
	}
	defer func() { p.ended = time.Now() }()
	limit := time.NewTimer(min(maxSilent*p.silence, max(maxStorm, p.silence)))
	defer limit.Stop()
	silence := time.NewTimer(p.silence)
	defer silence.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-limit.C:
			return
		case <-silence.C:
			return
		case <-events:
			silence.Reset(p.silence)
		}
	}
}

// scanner scans a host again and again, and remembers what has not answered.
type scanner struct {
	*patient
	families []*Family // in the order in which they are asked
	late     map[*Family]*reading[look]
	last     *Snapshot
	looks    []look // that the last one was made of
	traces   bool   // they are to tell whether the host is still the same
}

func newScanner(w Watch) *scanner {
	if w.Patience == 0 {
		w.Patience = 10 * time.Second
	}
	return &scanner{
		patient:  newPatient(w.Host, w.Patience),
		families: leftoversLast(w.Families),
		late:     make(map[*Family]*reading[look]),
	}
}

// scan returns what is known of the host now, nil if the context ends before. It
// reports whether a family has answered, now or before.
func (s *scanner) scan(ctx context.Context) (now *Snapshot, answered bool) {
	m, ok := await(ctx, s.patient, func(host *Host) matches { return match(host, s.families) })
	if !ok {
		return nil, false
	}
	looks := []look{{Problems: slices.Concat(s.hanging(), m.problems)}}
	ordinary := slices.DeleteFunc(slices.Clone(s.families), func(f *Family) bool { return f.Leftovers })
	looks = append(looks, s.read(ctx, ordinary, m, looks)...)
	for _, f := range s.families[len(ordinary):] { // each gets what those before leave
		looks = append(looks, s.read(ctx, []*Family{f}, m, looks)...)
	}
	share(looks, s.looks)
	now, ok = await(ctx, s.patient, func(host *Host) *Snapshot { return Merge(host, s.last, joinLooks(looks)) })
	answered = ok && (s.last != nil || anyRead(looks))
	if answered {
		s.last, s.looks = now, looks
	}
	return now, answered
}

// scanned says what became of the last scan.
func (s *scanner) scanned(took time.Duration) Scanned {
	last := Scanned{Took: took, Hanging: len(*s.hung.Load())}
	for _, f := range s.families {
		if s.late[f] != nil {
			last.Late = append(last.Late, f.Name)
		}
	}
	return last
}

// anyRead reports whether a family has answered, unless none was to be read.
func anyRead(looks []look) bool {
	unread := slices.ContainsFunc(looks, func(l look) bool { return l.unread })
	return !unread || slices.ContainsFunc(looks, func(l look) bool { return !l.unread && len(l.matched)+len(l.Devices) > 0 })
}

// read returns the looks of families, which are read at the same time.
func (s *scanner) read(ctx context.Context, families []*Family, m matches, before []look) []look {
	looks := make([]look, len(families))
	readings := make([]*reading[look], len(families))
	for i, f := range families {
		asked := m.of[f].left(f, before)
		asked.traces = s.traces
		looks[i], readings[i] = asked, s.late[f]
		if readings[i] == nil && asked.asks(f) {
			readings[i] = begin(s.patient, func(host *Host) look { return asked.in(host.FS).read(f, host) })
		}
	}
	limit := time.Now().Add(s.patience)
	alone := s.alone(ctx, families, looks, readings)
	for i, f := range families {
		if readings[i] != nil {
			looks[i] = s.answer(ctx, f, looks[i], readings[i], limit)
		}
	}
	for _, r := range alone {
		s.leave(r.view)
	}
	return looks
}

// alone begins to read each device alone of families that one read has kept for a while.
// So all that hang of a driver are known after one patience, instead of one after each.
func (s *scanner) alone(ctx context.Context, families []*Family, looks []look, readings []*reading[look]) (alone []*reading[look]) {
	soon := time.Now().Add(s.patience / 4)
	for i, f := range families {
		r := readings[i]
		if r == nil || r.late || r.wait(ctx, time.Until(soon)) || !s.suspect(r.view, s.patience/8) {
			continue
		}
		for _, d := range looks[i].matched {
			one := looks[i]
			one.matched = []sysfs.Device{d}
			alone = append(alone, begin(s.patient, func(host *Host) look { return one.in(host.FS).read(f, host) }))
		}
	}
	return alone
}

// ErrNoAnswer is in the [Problem] of a family that a scan went on without.
var ErrNoAnswer = errors.New("no answer")

// answer returns what a reading has found of a family. If it has not ended at
// the limit, the look is unread. A late reading goes on, and begins the scan in
// which its answer is used.
func (s *scanner) answer(ctx context.Context, f *Family, asked look, r *reading[look], limit time.Time) look {
	if r.late {
		limit = time.Now()
	}
	if r.wait(ctx, time.Until(limit)) {
		delete(s.late, f)
		return r.found
	}
	switch {
	case s.leave(r.view):
		delete(s.late, f)
		s.notify()
	case !r.late:
		r.late, s.late[f] = true, r
		go func() {
			<-r.ended
			s.notify()
		}()
	}
	asked.unread = true
	asked.Problems = append(asked.Problems, Problem{f.Name, fmt.Errorf("%w in %s%s", ErrNoAnswer, s.patience, r.where())})
	if s.last != nil {
		asked.had = slices.DeleteFunc(slices.Clone(s.last.found.Devices), func(d Device) bool { return d.Family != f.Name })
	}
	return asked
}

// Same reports whether two snapshots say the same of the host, whenever it was
// scanned, so that a reader need only be told of changes.
func Same(a, b *Snapshot) bool {
	if a == nil || b == nil {
		return a == b
	}
	return equality.Semantic.DeepEqual(a.Devices, b.Devices) &&
		slices.EqualFunc(a.Problems, b.Problems, func(p, q Problem) bool { return p.Error() == q.Error() })
}
