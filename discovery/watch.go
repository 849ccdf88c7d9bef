package discovery

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
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

	// Settle is how long the kernel must be silent before a burst of its
	// events is answered with one scan; 0 means 200 ms. A burst that does not
	// end is answered every ten times that long.
	Settle time.Duration

	// Patience is how long a scan may take until it is said that no device can
	// be read; 0 means 10 s. The kernel may never answer a read of a device that
	// hangs.
	Patience time.Duration

	// Events reports kernel events, one value for each burst at least; see
	// [Listen]. It may be nil.
	Events <-chan struct{}
}

// Run scans now, whenever the kernel reports an event, and at the interval,
// and hands each snapshot to publish, which is called from one goroutine. It
// returns when the context ends.
//
// A device that was described before and cannot be read for the moment keeps
// its last description with health Unknown; see [Merge]. While a scan takes
// longer than Patience that is so of all devices, and handed on each time that
// Patience has gone by again.
func (w Watch) Run(ctx context.Context, publish func(*Snapshot)) {
	if w.Interval == 0 {
		w.Interval = 30 * time.Second
	}
	if w.Settle == 0 {
		w.Settle = 200 * time.Millisecond
	}
	if w.Patience == 0 {
		w.Patience = 10 * time.Second
	}
	var last *Snapshot
	for {
		next := w.scan(ctx, last, publish)
		if next == nil {
			return
		}
		last = Merge(w.Host, last, next)
		last.Scanned = time.Now()
		publish(last)
		w.wait(ctx)
	}
}

// scan returns what a scan finds, nil if the context ends before. A scan that
// hangs in the kernel cannot be ended; nothing waits for it then.
func (w Watch) scan(ctx context.Context, last *Snapshot, publish func(*Snapshot)) *Snapshot {
	if ctx.Err() != nil {
		return nil
	}
	done := make(chan *Snapshot, 1)
	go func() { done <- Scan(w.Host, w.Families) }()
	late := time.NewTicker(w.Patience)
	defer late.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case found := <-done:
			return found
		case <-late.C:
			if last != nil {
				publish(last.unreadable(fmt.Errorf("the scan of the host takes longer than %s", w.Patience)))
			}
		}
	}
}

// unreadable returns the snapshot as it is when nothing of it can be read.
func (s *Snapshot) unreadable(why error) *Snapshot {
	out := &Snapshot{Devices: slices.Clone(s.Devices), Problems: append(slices.Clone(s.Problems), Problem{"host", why}), Scanned: s.Scanned}
	for i := range out.Devices {
		out.Devices[i].unread(why)
	}
	return out
}

// unread says that the description is of a time when the device could be read.
func (d *Device) unread(why error) {
	d.Health, d.Readings = Health{Status: Unknown, Reason: fmt.Sprintf("last description kept: %v", why)}, nil
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
// A device whose directory is there keeps its last description, with health
// Unknown and the problem as the reason, if a Problem says that it could not be
// read; and so does one that is missing because what leads to it could not be:
// its silicon, its family, or a list of devices. Parts that are kept so take the
// place of the whole that they would else be taken for. A PCI function of which
// nothing is described any more, since no driver is bound to it, keeps its last
// description too, and is said to be so.
func Merge(host *Host, last, next *Snapshot) *Snapshot {
	if last == nil {
		return next
	}
	devices := make(map[string]Device, len(next.Devices))
	for _, d := range next.Devices {
		devices[d.Name] = d
	}
	causes := causesOf(next.Problems)
	for _, old := range last.Devices {
		_, found := devices[old.Name]
		cause := causes[old.Name]
		if cause == nil && !found {
			cause = whyMissing(&old, causes)
		}
		if cause == nil && !found && isUnbound(host, old.Source) && !next.describes(&old) {
			devices[old.Name] = old.unbound()
			continue
		}
		if cause == nil || !host.Exists(path.Join("/", old.Source)) || !found && old.PartOf == nil && next.divides(old.Name) {
			continue
		}
		old.unread(cause)
		devices[old.Name] = old
		if _, beside := last.Lookup(old.Silicon()); !beside && old.PartOf != nil && causes[old.Silicon()] != nil {
			delete(devices, old.Silicon())
		}
	}
	return &Snapshot{
		Devices:  slices.SortedFunc(maps.Values(devices), func(a, b Device) int { return strings.Compare(a.Name, b.Name) }),
		Problems: next.Problems,
	}
}

// isUnbound reports whether a kernel device is a PCI function that is there and
// has no driver.
func isUnbound(host *Host, source string) bool {
	function := sysfs.At(host.FS, source)
	return sysfs.IsPCIAddress(function.Name()) && host.Exists(path.Join("/", source)) && !function.Bound()
}

// unbound returns the device as it is without its driver.
func (d Device) unbound() Device {
	d.Attributes = maps.Clone(d.Attributes)
	delete(d.Attributes, "driver")
	d.Health, d.Readings = noDriver, nil
	return d
}

// describes reports whether the snapshot says anything of a device's function or
// of the silicon that it is part of.
func (s *Snapshot) describes(old *Device) bool {
	return slices.ContainsFunc(s.Devices, func(d Device) bool { return d.Source == old.Source || d.Silicon() == old.Silicon() })
}

// causesOf returns the first problem of each device, and under "/sys/" that of
// a list of devices.
func causesOf(problems []Problem) map[string]error {
	causes := make(map[string]error)
	for _, problem := range problems {
		name := problem.Device
		if strings.HasPrefix(name, "/sys/") {
			name = "/sys/"
		}
		if causes[name] == nil {
			causes[name] = problem.Err
		}
	}
	return causes
}

// whyMissing returns what kept a scan from finding a device that is there, nil
// if nothing is known to have.
func whyMissing(d *Device, causes map[string]error) error {
	return cmp.Or(causes[d.Silicon()], causes[d.Family], causes["/sys/"])
}

// divides reports whether the snapshot has parts of the silicon of that name.
func (s *Snapshot) divides(silicon string) bool {
	return slices.ContainsFunc(s.Devices, func(d Device) bool { return d.PartOf != nil && d.PartOf.Name == silicon })
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
