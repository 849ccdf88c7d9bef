package discovery

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
)

// Watch is how a host is watched. Its zero value watches for ever, at the
// default interval, without kernel events.
type Watch struct {
	Host     *Host
	Families []*Family

	// Interval is the time between scans while the kernel reports nothing;
	// 0 means 30 s.
	Interval time.Duration

	// Settle is how long the kernel must be silent before a burst of its
	// events is answered with one scan; 0 means 200 ms. A burst that does not
	// end is answered every ten times that long.
	Settle time.Duration

	// Events reports kernel events, one value for each burst at least; see
	// [Listen]. It may be nil.
	Events <-chan struct{}
}

// Run scans now, whenever the kernel reports an event, and at the interval,
// and hands each snapshot to publish, which is called from one goroutine. It
// returns when the context ends.
//
// A device that was described before and cannot be read for the moment keeps
// its last description with health Unknown; see [Merge].
func (w Watch) Run(ctx context.Context, publish func(*Snapshot)) {
	if w.Interval == 0 {
		w.Interval = 30 * time.Second
	}
	if w.Settle == 0 {
		w.Settle = 200 * time.Millisecond
	}
	var last *Snapshot
	for ctx.Err() == nil {
		last = Merge(w.Host, last, Scan(w.Host, w.Families))
		publish(last)
		w.wait(ctx)
	}
}

// wait returns when it is time for the next scan.
func (w Watch) wait(ctx context.Context) {
	interval := time.NewTimer(w.Interval)
	defer interval.Stop()
	select {
	case <-ctx.Done():
	case <-interval.C:
	case <-w.Events:
		w.settle(ctx)
	}
}

// settle returns when the kernel has been silent for a while.
func (w Watch) settle(ctx context.Context) {
	limit := time.NewTimer(10 * w.Settle)
	defer limit.Stop()
	for {
		silence := time.NewTimer(w.Settle)
		select {
		case <-ctx.Done():
			silence.Stop()
			return
		case <-limit.C:
			silence.Stop()
			return
		case <-silence.C:
			return
		case <-w.Events:
			silence.Stop()
		}
	}
}

// Merge returns the next snapshot with what is still true of the last one.
//
// Absence is a statement: a device whose directory is gone from sysfs is gone.
// A device whose directory is there, and which a Problem says could not be
// read, keeps its last description, with health Unknown and the problem as
// the reason.
func Merge(host *Host, last, next *Snapshot) *Snapshot {
	if last == nil {
		return next
	}
	unread := make(map[string]error)
	for _, problem := range next.Problems {
		if unread[problem.Device] == nil {
			unread[problem.Device] = problem.Err
		}
	}
	devices := slices.Clone(next.Devices)
	for _, old := range last.Devices {
		cause := unread[old.Name]
		if cause == nil || !host.Exists(path.Join("/", old.Source)) {
			continue
		}
		old.Health = Health{Unknown, fmt.Sprintf("last description kept: %v", cause)}
		i, found := slices.BinarySearchFunc(devices, old.Name, func(d Device, name string) int {
			return strings.Compare(d.Name, name)
		})
		if found {
			devices[i] = old
		} else {
			devices = slices.Insert(devices, i, old)
		}
	}
	return &Snapshot{Devices: devices, Problems: next.Problems}
}

// Same reports whether two snapshots say the same, so that a reader need only
// be told of changes.
func Same(a, b *Snapshot) bool {
	if a == nil || b == nil {
		return a == b
	}
	return equality.Semantic.DeepEqual(a.Devices, b.Devices) &&
		slices.EqualFunc(a.Problems, b.Problems, func(p, q Problem) bool { return p.Error() == q.Error() })
}
