package scan

import (
	"context"
	"fmt"
	"slices"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Watch configures how a host is watched. The zero value watches permanently, at the default
// interval, without kernel events.
type Watch struct {
	Host     *discovery.Host
	Families []*discovery.Family

	// Interval is the time between scans without kernel events; 0 means 30 s. After a scan that
	// took longer than half of the interval, the pause is as long as the scan, so that scans of
	// a slow host take at most half of the time.
	Interval time.Duration

	// EventsArrive reports whether all kernel events of the host reach Events. If so, a scan
	// after an event reads only the families that the event may concern. At the interval, the
	// watch compares files without events, such as sensors and the nodes in /dev, and reads the
	// families with changes and those with problems. Every tenth interval, and after a problem
	// with a list of devices, the watch reads all families. On a host where reading all
	// families takes long, it does so less often; see [completePause]. If EventsArrive is nil,
	// each scan reads all families, except a scan that only takes a late answer.
	EventsArrive func() bool

	// Settle is the time without further events after which the first event triggers a scan; 0
	// means 20 ms, which covers most events of one device. The time doubles with each scan that
	// follows soon after the last scan, up to sixteen times Settle (320 ms), so that a storm of
	// events causes only a few scans. If the events never pause, a scan follows after ten times
	// that time, but at most 2 s.
	Settle time.Duration

	// Patience is the time limit for a family's answer; 0 means 10 s. A read of a hanging device
	// may never return.
	Patience time.Duration

	// Observe is called at the end of each scan. Optional.
	Observe func(Result)

	// Events reports possible changes, such as kernel events; see [Listen]. Events may be nil.
	Events <-chan Changes
}

// Result reports the result of a scan.
type Result struct {
	Took    time.Duration
	Late    []string // names of the families that exceeded the patience, in order
	Hanging int      // reads of devices that have not ended
}

// Run scans at once, after possible changes, and at the interval, and calls publish with each
// snapshot from one goroutine. If no family has to be read, Run creates no snapshot. Run returns
// when the context ends.
//
// A known device that cannot be read at the moment keeps its last description with health Unknown;
// see [RescanHost].
//
// Families are read concurrently and do not wait for each other. After Patience, a scan continues
// without the families that have not answered, and all devices of these families count as
// unreadable. If a single read blocks a family, the next scan follows at once and reads the family
// without the hanging device. That device counts as unreadable until its read ends. Run publishes
// nothing before the first family has answered.
func (w Watch) Run(ctx context.Context, publish func(*discovery.Snapshot)) {
	if w.Interval == 0 {
		w.Interval = 30 * time.Second
	}
	if w.Settle == 0 {
		w.Settle = 20 * time.Millisecond
	}
	s, pace := newScanner(w), pace{shortest: w.Settle}
	var complete, compared time.Time // when the next full scan without a cause is due, and the last time of a comparison without events
	followsEvents := func() bool { return w.hearsEvents() && s.hasLists() && time.Now().Before(complete) }
	concerns := func(c Changes) bool { return !followsEvents() || s.concernsFamilies(c) }
	changes, rest := Changes{Everything: true}, time.Duration(0) // rest is the pause before the next scan for late answers
	for ctx.Err() == nil {
		began := time.Now()
		var snapshot *discovery.Snapshot
		answered := false
		switch {
		case changes.late:
			snapshot, answered = s.scan(ctx, familyScan.isAnswered)
		case changes.Everything || !followsEvents():
			compared, s.traces = began, w.hearsEvents()
			snapshot, answered = s.scan(ctx, nil)
			complete = began.Add(completePause(w.Interval, time.Since(began)))
		case len(changes.Uevents) > 0:
			snapshot, answered = s.scan(ctx, func(l familyScan) bool {
				return l.followsEvents() && !slices.ContainsFunc(changes.Uevents, l.seesDeviceOf)
			})
		default:
			compared = began
			if s.compare(ctx) > 0 {
				snapshot, answered = s.scan(ctx, func(l familyScan) bool { return !l.changed })
			}
		}
		if w.Observe != nil && ctx.Err() == nil {
			w.Observe(s.lastScan(time.Since(began)))
		}
		if answered && ctx.Err() == nil {
			publish(snapshot)
		}
		next := compared.Add(w.Interval)
		if rested := time.Now().Add(time.Since(began)); rested.After(next) {
			next = rested
		}
		switch {
		case changes.late:
			rest = min(max(2*rest, time.Since(began)), w.Interval)
		case len(s.again) == 0:
			rest = 0
		}
		changes = w.wait(ctx, s.again, rest, next, &pace, concerns)
	}
}

// completeAfter is the number of intervals after which all families are read even without an event.
// completeShare is how many times longer than the scan itself the time between two such scans is,
// at least: they use at most one percent of the time, but follow within the time completeAtLast.
const (
	completeAfter  = 10
	completeShare  = 100
	completeAtLast = time.Hour
)

// completePause returns the time between two scans that read all families without a cause. took is
// the duration of the first scan.
func completePause(interval, took time.Duration) time.Duration {
	return max(completeAfter*interval, min(completeShare*took, completeAtLast))
}

func (w Watch) hearsEvents() bool { return w.EventsArrive != nil && w.EventsArrive() }

// ScanOnce scans as Run does until further scans would find nothing new without the hanging reads,
// and returns the result. Problems name the families and devices that have not answered. ScanOnce
// returns the context's error if the context ends first.
func (w Watch) ScanOnce(ctx context.Context) (*discovery.Snapshot, error) {
	s := newScanner(w)
	for keeps := (func(familyScan) bool)(nil); ; keeps = familyScan.isAnswered {
		snapshot, _ := s.scan(ctx, keeps)
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

// wait returns when the next scan is due, with the possible changes. At the interval, the changes
// are empty. wait ignores changes that concern no family, and late answers before the end of rest.
func (w Watch) wait(ctx context.Context, again <-chan struct{}, rest time.Duration, next time.Time, pace *pace, concerns func(Changes) bool) Changes {
	interval := time.NewTimer(time.Until(next))
	defer interval.Stop()
	rested := time.NewTimer(rest)
	defer rested.Stop()
	var answers <-chan struct{} // nil until the rest is over
	if rest == 0 {
		answers = again
	}
	for {
		select {
		case <-ctx.Done():
			return Changes{}
		case <-interval.C:
			return Changes{}
		case <-rested.C:
			answers = again
		case <-answers:
			return Changes{late: true}
		case changes := <-w.Events:
			if concerns(changes) {
				return pace.settleEvents(ctx, changes, w.Events, concerns)
			}
		}
	}
}

// pace decides how soon a scan follows events.
type pace struct {
	shortest time.Duration // the pause before the first of several scans
	silence  time.Duration // the pause before the last scan
	ended    time.Time     // the end of the last wait in settle
}

// maxSlower limits how often the pause doubles, as a factor. maxSilent (in pauses) and maxStorm
// limit the wait while events continue. After the time calm without events, the pause is the
// shortest again.
const (
	maxSlower = 16
	maxSilent = 10
	maxStorm  = 2 * time.Second
	calmTime  = 2 * time.Second
)

// settleEvents returns all changes when events have paused for a while, or when events have
// continued for too long.
func (p *pace) settleEvents(ctx context.Context, changes Changes, events <-chan Changes, concerns func(Changes) bool) Changes {
	p.silence = min(2*p.silence, maxSlower*p.shortest)
	if time.Since(p.ended) > calmTime || p.silence == 0 {
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

// scanner scans a host repeatedly, and remembers which reads have not ended.
type scanner struct {
	*patient
	families  []*discovery.Family // in the order of reading
	lateReads map[*discovery.Family]*reading[familyScan]
	last      *Findings    // of the last scan, nil before the first answer; the reader has the joined devices
	looks     []familyScan // the basis of the last snapshot: first the problems of lists, then one look for each family
	traces    bool         // looks are to record their reads; see [trace]
}

func newScanner(w Watch) *scanner {
	if w.Patience == 0 {
		w.Patience = 10 * time.Second
	}
	return &scanner{
		patient:   newPatient(w.Host, w.Patience),
		families:  leftoversLast(w.Families),
		lateReads: make(map[*discovery.Family]*reading[familyScan]),
	}
}

// scan returns the present snapshot of the host, nil if the context ends first. answered reports
// whether a family has answered, now or before. If keeps returns true for a family's last scan,
// scan does not read the family again, unless the matched devices have changed. If keeps is nil,
// scan reads all families.
func (s *scanner) scan(ctx context.Context, keeps func(familyScan) bool) (now *discovery.Snapshot, answered bool) {
	kept := make(map[*discovery.Family]familyScan)
	for i, f := range s.families {
		if keeps != nil && s.looks != nil && keeps(s.looks[1+i]) {
			kept[f] = s.looks[1+i]
		}
	}
	matching := awaitRead(ctx, s.patient, func(host *discovery.Host) matches { return match(host, s.families) })
	if matching == nil {
		return nil, false
	}
	m := matching.found
	looks := []familyScan{{Problems: slices.Concat(s.hangProblems(), m.problems)}}
	ordinary := slices.DeleteFunc(slices.Clone(s.families), func(f *discovery.Family) bool { return f.Leftovers })
	looks = append(looks, s.read(ctx, ordinary, m, kept, looks)...)
	for _, f := range s.families[len(ordinary):] { // each gets the devices that the earlier families left
		looks = append(looks, s.read(ctx, []*discovery.Family{f}, m, kept, looks)...)
	}
	if matching.skipped.Load() { // the kernel devices of every family may lack answers
		for i := range looks {
			looks[i].skipped = true
		}
	}
	shareDescriptions(looks, s.looks)
	merging := awaitRead(ctx, s.patient, func(host *discovery.Host) *Findings { return mergeFindings(host, s.last, findingsOf(looks)) })
	if merging == nil {
		return nil, false
	}
	answered = s.last != nil || anyRead(looks)
	if answered {
		s.last, s.looks = merging.found, looks
	}
	return merging.found.Snapshot(), answered
}

// lastScan returns the result of the last scan.
func (s *scanner) lastScan(took time.Duration) Result {
	last := Result{Took: took, Hanging: len(*s.hanging.Load())}
	for _, f := range s.families {
		if s.lateReads[f] != nil {
			last.Late = append(last.Late, f.Name)
		}
	}
	return last
}

// anyRead reports whether a family has answered, or no family had to be read.
func anyRead(looks []familyScan) bool {
	unread := slices.ContainsFunc(looks, func(l familyScan) bool { return l.isUnread })
	return !unread || slices.ContainsFunc(looks, func(l familyScan) bool { return !l.isUnread && len(l.matched)+len(l.Devices) > 0 })
}

// read returns the scans of families. Families are read concurrently. A kept scan is not read
// again.
func (s *scanner) read(ctx context.Context, families []*discovery.Family, m matches, kept map[*discovery.Family]familyScan, before []familyScan) []familyScan {
	looks := make([]familyScan, len(families))
	readings := make([]*reading[familyScan], len(families))
	for i, f := range families {
		asked := m.of[f].leftoversAfter(f, before)
		if last, ok := kept[f]; ok && last.sameDevices(asked) {
			looks[i] = last
			continue
		}
		asked.traces = s.traces
		looks[i], readings[i] = asked, s.lateReads[f]
		if readings[i] == nil && asked.needsRead(f) {
			readings[i] = begin(s.patient, func(host *discovery.Host) familyScan { return asked.in(host.FS).read(f, host) })
		}
	}
	limit := time.Now().Add(s.patience)
	alone := s.readAlone(ctx, families, looks, readings)
	for i, f := range families {
		if readings[i] != nil {
			looks[i] = s.takeAnswer(ctx, f, looks[i], readings[i], limit)
		}
	}
	for _, r := range alone {
		s.abandonView(r.view)
	}
	return looks
}

// readAlone starts a separate read of each device for families that one read has blocked for a
// while. All hanging devices of a driver are then known after one patience, instead of one patience
// per device.
func (s *scanner) readAlone(ctx context.Context, families []*discovery.Family, looks []familyScan, readings []*reading[familyScan]) (alone []*reading[familyScan]) {
	soon := time.Now().Add(s.patience / 4)
	for i, f := range families {
		r := readings[i]
		if r == nil || r.isLate || r.wait(ctx, time.Until(soon)) || !s.suspectView(r.view, s.patience/8) {
			continue
		}
		for _, d := range looks[i].matched {
			one := looks[i]
			one.matched = []sysfs.Device{d}
			alone = append(alone, begin(s.patient, func(host *discovery.Host) familyScan { return one.in(host.FS).read(f, host) }))
		}
	}
	return alone
}

// takeAnswer returns the findings of a reading. If the reading has not ended at the limit, the scan
// is unread. A late reading continues, and triggers the scan that uses its answer.
func (s *scanner) takeAnswer(ctx context.Context, f *discovery.Family, asked familyScan, r *reading[familyScan], limit time.Time) familyScan {
	if r.isLate {
		limit = time.Now()
	}
	if r.wait(ctx, time.Until(limit)) {
		delete(s.lateReads, f)
		r.found.skipped = r.skipped.Load()
		return r.found
	}
	switch {
	case s.abandonView(r.view):
		delete(s.lateReads, f)
		s.notify()
	case !r.isLate:
		r.isLate, s.lateReads[f] = true, r
		go func() {
			<-r.ended
			s.notify()
		}()
	}
	asked.isUnread = true
	asked.Problems = append(asked.Problems, discovery.Problem{Device: f.Name, Err: fmt.Errorf("%w in %s%s", discovery.ErrNoAnswer, s.patience, r.whereText())})
	if s.last != nil {
		for _, d := range s.last.devices {
			if d.Family == f.Name {
				asked.hadDevices = append(asked.hadDevices, *d)
			}
		}
	}
	return asked
}
