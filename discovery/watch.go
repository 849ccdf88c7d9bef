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

	// Hears reports whether all kernel events of the host reach Events. Then a scan after an
	// event reads only the families that the event may concern. At the interval, the watch compares what has no events, such as sensors and the nodes in /dev, and reads
	// the families for which it has changed. Every tenth interval, and after a scan that
	// found problems, all families are read. Nil means that each scan reads all families.
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

	// Events reports what may have changed, such as by kernel events; see [Listen]. It may
	// be nil.
	Events <-chan Changes
}

// Scanned is what became of a scan.
type Scanned struct {
	Took    time.Duration
	Late    []string // names of the families that have not answered in time, in order
	Hanging int      // reads of devices that have not ended
}

// Run scans now, when something may have changed, and at the interval, and calls publish with
// each snapshot, from one goroutine. If no family has to be read, there is no new snapshot. It
// returns when the context ends.
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
	var complete, compared time.Time // when all families were read, and what has no events was compared
	followsEvents := func() bool {
		return w.hears() && s.isCalm() && time.Since(complete) < completeAfter*w.Interval
	}
	concerns := func(c Changes) bool { return !followsEvents() || s.concerns(c) }
	changes := Changes{Everything: true}
	for ctx.Err() == nil {
		began := time.Now()
		atInterval := !changes.Everything && len(changes.Uevents) == 0
		var snapshot *Snapshot
		answered := false
		switch {
		case changes.Everything || !followsEvents():
			complete, compared, s.traces = began, began, w.hears()
			snapshot, answered = s.scan(ctx, nil)
		case !atInterval:
			snapshot, answered = s.scan(ctx, func(_ *Family, l look) bool { return !slices.ContainsFunc(changes.Uevents, l.seesDeviceOf) })
		default:
			compared = began
			if changed := s.compare(ctx); len(changed) > 0 {
				snapshot, answered = s.scan(ctx, func(f *Family, _ look) bool { return !changed[f] })
			}
		}
		if w.Observe != nil && ctx.Err() == nil {
			w.Observe(s.scanned(time.Since(began)))
		}
		if answered && ctx.Err() == nil {
			publish(snapshot)
		}
		changes = w.wait(ctx, s.again, compared.Add(w.Interval), &pace, concerns)
	}
}

// completeAfter is after how many intervals all families are read although no event
// concerned them.
const completeAfter = 10

func (w Watch) hears() bool { return w.Hears != nil && w.Hears() }

// Once scans as Run does, until nothing more is to be found without what does not
// answer, and returns what it found. Problems name what has not answered. The
// error is that of the context, if that ends before.
func (w Watch) Once(ctx context.Context) (*Snapshot, error) {
	s := newScanner(w)
	for {
		snapshot, _ := s.scan(ctx, nil)
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

// wait returns when it is time for the next scan, with what may have changed: nothing that is
// known of at the interval. It ignores changes that do not concern any family.
func (w Watch) wait(ctx context.Context, again <-chan struct{}, next time.Time, pace *pace, concerns func(Changes) bool) Changes {
	interval := time.NewTimer(time.Until(next))
	defer interval.Stop()
	for {
		select {
		case <-ctx.Done():
			return Changes{}
		case <-interval.C:
			return Changes{}
		case <-again:
			return Changes{Everything: true}
		case changes := <-w.Events:
			if concerns(changes) {
				return pace.settle(ctx, changes, w.Events, concerns)
			}
		}
	}
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

// settle returns when there were no further changes for a while, or when they have gone on
// for too long, with all of them.
func (p *pace) settle(ctx context.Context, changes Changes, events <-chan Changes, concerns func(Changes) bool) Changes {
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
			return changes
		case <-limit.C:
			return changes
		case <-silence.C:
			return changes
		case more := <-events:
			if concerns(more) {
				changes = changes.and(more)
				silence.Reset(p.silence)
			}
		}
	}
}

// scanner scans a host again and again, and remembers what has not answered.
type scanner struct {
	*patient
	families []*Family // in the order in which they are asked
	late     map[*Family]*reading[look]
	last     *Snapshot
	looks    []look // that the last one was made of: problems of lists, and one of each family
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
// reports whether a family has answered, now or before. It does not read a family again of
// whose last look keeps reports true, unless the family matches other devices than then. If
// keeps is nil, it reads all families.
func (s *scanner) scan(ctx context.Context, keeps func(*Family, look) bool) (now *Snapshot, answered bool) {
	kept := make(map[*Family]look)
	for i, f := range s.families {
		if keeps != nil && keeps(f, s.looks[1+i]) {
			kept[f] = s.looks[1+i]
		}
	}
	m, ok := await(ctx, s.patient, func(host *Host) matches { return match(host, s.families) })
	if !ok {
		return nil, false
	}
	looks := []look{{Problems: slices.Concat(s.hanging(), m.problems)}}
	ordinary := slices.DeleteFunc(slices.Clone(s.families), func(f *Family) bool { return f.Leftovers })
	looks = append(looks, s.read(ctx, ordinary, m, kept, looks)...)
	for _, f := range s.families[len(ordinary):] { // each gets what those before leave
		looks = append(looks, s.read(ctx, []*Family{f}, m, kept, looks)...)
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

// read returns the looks of families, which are read at the same time. A look that is kept
// need not be made again.
func (s *scanner) read(ctx context.Context, families []*Family, m matches, kept map[*Family]look, before []look) []look {
	looks := make([]look, len(families))
	readings := make([]*reading[look], len(families))
	for i, f := range families {
		asked := m.of[f].left(f, before)
		if last, ok := kept[f]; ok && last.of(asked) {
			looks[i] = last
			continue
		}
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
		for _, d := range s.last.found.devices {
			if d.Family == f.Name {
				asked.had = append(asked.had, *d)
			}
		}
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
