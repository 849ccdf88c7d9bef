package scan

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// patient reads a host where a read of any file may hang, for example because a driver never
// releases a lock. The kernel offers no way to cancel such a read, so each reading runs in a
// goroutine of its own, which is abandoned if the read hangs.
type patient struct {
	host     *discovery.Host
	patience time.Duration
	again    chan struct{} // holds a value when a scan may find more than the last one did; see notify

	mu      sync.Mutex // held while hung is replaced
	hanging atomic.Pointer[[]*hang]
}

// hang is a read without an end.
type hang struct {
	step
	view   *view
	object string // the directory of the PCI function, or the file if there is none
}

// stopsStep reports whether a step must be skipped while the read hangs. The kernel looks up links
// and directory entries without the driver, so these steps are skipped only if such a lookup hangs
// itself.
func (h *hang) stopsStep(op, file string) bool {
	return h.object == hangUnit(file) && (!isLook(op) || isLook(h.op))
}

func isLook(op string) bool { return op == "stat" || op == "lstat" || op == "readlink" }

func newPatient(host *discovery.Host, patience time.Duration) *patient {
	p := &patient{host: host, patience: patience, again: make(chan struct{}, 1)}
	p.hanging.Store(&[]*hang{})
	return p
}

// hangUnit returns the path to skip while a read of the file hangs: the whole PCI function, because
// its other files would probably hang too.
func hangUnit(file string) string {
	if function, ok := sysfs.At(nil, file).PCIFunction(); ok {
		return function.Path
	}
	return file
}

// stopsStep reports whether a step must be skipped because it would hang.
func (p *patient) stopsStep(op, file string) bool {
	return slices.ContainsFunc(*p.hanging.Load(), func(h *hang) bool { return h.stopsStep(op, file) })
}

// hangProblems returns a Problem for each PCI function with a read that hangs.
func (p *patient) hangProblems() (problems []discovery.Problem) {
	for _, h := range *p.hanging.Load() {
		if function := sysfs.At(nil, h.object); sysfs.IsPCIAddress(function.Name()) {
			problems = append(problems, discovery.Problem{Device: discovery.DeviceName(function), Err: fmt.Errorf("%s %s: %w", h.op, h.file, discovery.ErrHangs)})
		}
	}
	return problems
}

// changeHung replaces the list of hanging reads.
func (p *patient) changeHung(change func([]*hang) []*hang) {
	p.mu.Lock()
	defer p.mu.Unlock()
	hung := change(slices.Clone(*p.hanging.Load()))
	p.hanging.Store(&hung)
}

// notify reports on p.again that another scan may find more.
func (p *patient) notify() {
	select {
	case p.again <- struct{}{}:
	default:
	}
}

// abandonView abandons the view's reading if one read has lasted for at least half of the patience,
// and reports whether it did. The hanging device is not read again until that read returns.
func (p *patient) abandonView(v *view) bool {
	if !p.suspectView(v, p.patience/2) {
		return false
	}
	v.isAbandoned.Store(true)
	return true
}

// suspectView reports whether one read of the view has lasted for the given time. If so, no view
// reads that device until the read returns.
func (p *patient) suspectView(v *view, lasted time.Duration) bool {
	at := v.now()
	if at.op == "" || time.Since(at.since) < lasted {
		return false
	}
	p.changeHung(func(hung []*hang) []*hang {
		if slices.ContainsFunc(hung, func(h *hang) bool { return h.view == v }) {
			return hung
		}
		return append(hung, &hang{at, v, hangUnit(at.file)})
	})
	if v.now() != at {
		p.markAnswered(v)
	}
	return true
}

// markAnswered removes the view's read from the list of hanging reads.
func (p *patient) markAnswered(v *view) {
	mine := func(h *hang) bool { return h.view == v }
	if !slices.ContainsFunc(*p.hanging.Load(), mine) {
		return
	}
	p.changeHung(func(hung []*hang) []*hang { return slices.DeleteFunc(hung, mine) })
	if v.isAbandoned.Load() {
		p.notify()
	}
}

// awaitRead returns a reading of the host that has ended. If a reading hangs, awaitRead abandons it
// and starts another one without the hanging files, until one ends. awaitRead returns nil if the
// context ends first.
func awaitRead[T any](ctx context.Context, p *patient, read func(*discovery.Host) T) *reading[T] {
	for ctx.Err() == nil {
		if r := begin(p, read); r.waitEnd(ctx) {
			return r
		}
	}
	return nil
}

// reading is a goroutine that reads a host.
type reading[T any] struct {
	*view

	found  T    // valid once ended is closed
	isLate bool // the reading was abandoned
}

// begin starts a reading of the host.
func begin[T any](p *patient, read func(*discovery.Host) T) *reading[T] {
	r := &reading[T]{view: &view{patient: p, ended: make(chan struct{})}}
	host := *p.host
	host.FS = r.view
	go func() {
		defer close(r.ended)
		r.found = read(&host)
	}()
	return r
}

// wait waits for the end of the reading, at most for limit, and reports whether it has ended.
func (r *reading[T]) wait(ctx context.Context, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-r.ended:
	case <-timer.C:
	case <-ctx.Done():
	}
	select {
	case <-r.ended:
		return true
	default:
		return false
	}
}

// waitEnd waits for the end of the reading, and reports whether the reading has ended. If a read
// hangs, waitEnd abandons the reading.
func (r *reading[T]) waitEnd(ctx context.Context) bool {
	for !r.wait(ctx, r.patient.patience) {
		if ctx.Err() != nil || r.patient.abandonView(r.view) {
			return false
		}
	}
	return true
}

// view is the host's file system as one reading sees it. It records the current step, refuses steps
// that would hang, and refuses all steps once the reading was abandoned.
type view struct {
	patient     *patient
	ended       chan struct{} // closed when the reading has ended
	isAbandoned atomic.Bool
	skipped     atomic.Bool // steps were refused because they would hang

	mu sync.Mutex
	at step // the current step, zero between two steps
}

// whereText describes the current step for a message.
func (v *view) whereText() string {
	at := v.now()
	if at.op == "" {
		return ""
	}
	return fmt.Sprintf(" (%s %s)", at.op, at.file)
}

// step is a file system operation in progress.
type step struct {
	op, file string
	since    time.Time
}

// runStep runs an operation that may hang.
func (v *view) runStep(op, file string, do func() error) error {
	if v.isAbandoned.Load() || v.patient.stopsStep(op, file) {
		v.skipped.Store(true)
		return &fs.PathError{Op: op, Path: file, Err: discovery.ErrHangs}
	}
	v.setStep(step{op, file, time.Now()})
	defer func() {
		v.setStep(step{})
		v.patient.markAnswered(v)
	}()
	return do()
}

func (v *view) setStep(at step) {
	v.mu.Lock()
	v.at = at
	v.mu.Unlock()
}

// now returns the current step.
func (v *view) now() step {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.at
}

// Open implements [fs.FS].
func (v *view) Open(name string) (file fs.File, err error) {
	err = v.runStep("open", name, func() error { file, err = v.patient.host.FS.Open(name); return err })
	if err != nil {
		return nil, err
	}
	return &viewed{file, v, name}, nil
}

// Stat implements [fs.StatFS].
func (v *view) Stat(name string) (info fs.FileInfo, err error) {
	err = v.runStep("stat", name, func() error { info, err = fs.Stat(v.patient.host.FS, name); return err })
	return info, err
}

// Lstat implements [fs.ReadLinkFS].
func (v *view) Lstat(name string) (info fs.FileInfo, err error) {
	err = v.runStep("lstat", name, func() error { info, err = fs.Lstat(v.patient.host.FS, name); return err })
	return info, err
}

// ReadLink implements [fs.ReadLinkFS].
func (v *view) ReadLink(name string) (target string, err error) {
	err = v.runStep("readlink", name, func() error { target, err = fs.ReadLink(v.patient.host.FS, name); return err })
	return target, err
}

// ReadDir implements [fs.ReadDirFS].
func (v *view) ReadDir(name string) (entries []fs.DirEntry, err error) {
	err = v.runStep("readdir", name, func() error { entries, err = fs.ReadDir(v.patient.host.FS, name); return err })
	return entries, err
}

// viewed is a file of a view.
type viewed struct {
	fs.File

	view *view
	name string
}

// Read implements [fs.File].
func (f *viewed) Read(p []byte) (n int, err error) {
	err = f.view.runStep("read", f.name, func() error { n, err = f.File.Read(p); return err })
	return n, err
}
