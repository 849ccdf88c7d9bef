package discovery

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"chandler.dev/discovery/sysfs"
)

// patient reads a host where a read of any file may hang, for example because a driver never releases
// a lock. The kernel offers no way to cancel such a read, so each reading runs in a goroutine of its
// own, which is abandoned if the read hangs.
type patient struct {
	host     *Host
	patience time.Duration
	again    chan struct{} // holds a value when a scan may find more than the last one did; see notify

	mu   sync.Mutex // held while hung is replaced
	hung atomic.Pointer[[]*hang]
}

// hang is a read without an end.
type hang struct {
	step
	of   *view
	what string // the directory of the PCI function, or the file if there is none
}

// stops reports whether a step must be skipped while the read hangs. The kernel looks up links and
// directory entries without the driver, so these steps are skipped only if such a lookup hangs
// itself.
func (h *hang) stops(op, file string) bool {
	return h.what == hangUnit(file) && (!isLook(op) || isLook(h.op))
}

func isLook(op string) bool { return op == "stat" || op == "lstat" || op == "readlink" }

func newPatient(host *Host, patience time.Duration) *patient {
	p := &patient{host: host, patience: patience, again: make(chan struct{}, 1)}
	p.hung.Store(&[]*hang{})
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

// stops reports whether a step must be skipped because it would hang.
func (p *patient) stops(op, file string) bool {
	return slices.ContainsFunc(*p.hung.Load(), func(h *hang) bool { return h.stops(op, file) })
}

// hanging returns a Problem for each PCI function with a read that hangs.
func (p *patient) hanging() (problems []Problem) {
	for _, h := range *p.hung.Load() {
		if function := sysfs.At(nil, h.what); sysfs.IsPCIAddress(function.Name()) {
			problems = append(problems, Problem{DeviceName(function), fmt.Errorf("%s %s: %w", h.op, h.file, ErrHangs)})
		}
	}
	return problems
}

// change replaces the list of hanging reads.
func (p *patient) change(change func([]*hang) []*hang) {
	p.mu.Lock()
	defer p.mu.Unlock()
	hung := change(slices.Clone(*p.hung.Load()))
	p.hung.Store(&hung)
}

// notify reports on p.again that another scan may find more.
func (p *patient) notify() {
	select {
	case p.again <- struct{}{}:
	default:
	}
}

// leave abandons the view's reading if one read has lasted for at least half of the patience, and
// reports whether it did. The hanging device is not read again until that read returns.
func (p *patient) leave(v *view) bool {
	if !p.suspect(v, p.patience/2) {
		return false
	}
	v.left.Store(true)
	return true
}

// suspect reports whether one read of the view has lasted for the given time. If so, no view reads
// that device until the read returns.
func (p *patient) suspect(v *view, lasted time.Duration) bool {
	at := v.now()
	if at.op == "" || time.Since(at.since) < lasted {
		return false
	}
	p.change(func(hung []*hang) []*hang {
		if slices.ContainsFunc(hung, func(h *hang) bool { return h.of == v }) {
			return hung
		}
		return append(hung, &hang{at, v, hangUnit(at.file)})
	})
	if v.now() != at {
		p.answered(v)
	}
	return true
}

// answered removes the view's read from the list of hanging reads.
func (p *patient) answered(v *view) {
	mine := func(h *hang) bool { return h.of == v }
	if !slices.ContainsFunc(*p.hung.Load(), mine) {
		return
	}
	p.change(func(hung []*hang) []*hang { return slices.DeleteFunc(hung, mine) })
	if v.left.Load() {
		p.notify()
	}
}

// await returns the result of read. If the reading hangs, await abandons it and starts another one
// without the hanging files, until one ends. ok is false if the context ends first.
func await[T any](ctx context.Context, p *patient, read func(*Host) T) (found T, ok bool) {
	for {
		r := begin(p, read)
		for left := false; !left; left = p.leave(r.view) {
			if r.wait(ctx, p.patience) {
				return r.found, true
			}
			if ctx.Err() != nil {
				return found, false
			}
		}
	}
}

// reading is a goroutine that reads a host.
type reading[T any] struct {
	*view

	found T    // valid once ended is closed
	late  bool // the reading was abandoned
}

// begin starts a reading of the host.
func begin[T any](p *patient, read func(*Host) T) *reading[T] {
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

// view is the host's file system as one reading sees it. It records the current step, refuses steps
// that would hang, and refuses all steps once the reading was abandoned.
type view struct {
	patient *patient
	ended   chan struct{} // closed when the reading has ended
	left    atomic.Bool

	mu sync.Mutex
	at step // the current step, zero between two steps
}

// where describes the current step for a message.
func (v *view) where() string {
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

// ErrHangs is the error of a read that does not return.
var ErrHangs = errors.New("does not answer")

// step runs an operation that may hang.
func (v *view) step(op, file string, do func() error) error {
	if v.left.Load() || v.patient.stops(op, file) {
		return &fs.PathError{Op: op, Path: file, Err: ErrHangs}
	}
	v.note(step{op, file, time.Now()})
	defer func() {
		v.note(step{})
		v.patient.answered(v)
	}()
	return do()
}

func (v *view) note(at step) {
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
	err = v.step("open", name, func() error { file, err = v.patient.host.FS.Open(name); return err })
	if err != nil {
		return nil, err
	}
	return &viewed{file, v, name}, nil
}

// Stat implements [fs.StatFS].
func (v *view) Stat(name string) (info fs.FileInfo, err error) {
	err = v.step("stat", name, func() error { info, err = fs.Stat(v.patient.host.FS, name); return err })
	return info, err
}

// Lstat implements [fs.ReadLinkFS].
func (v *view) Lstat(name string) (info fs.FileInfo, err error) {
	err = v.step("lstat", name, func() error { info, err = fs.Lstat(v.patient.host.FS, name); return err })
	return info, err
}

// ReadLink implements [fs.ReadLinkFS].
func (v *view) ReadLink(name string) (target string, err error) {
	err = v.step("readlink", name, func() error { target, err = fs.ReadLink(v.patient.host.FS, name); return err })
	return target, err
}

// ReadDir implements [fs.ReadDirFS].
func (v *view) ReadDir(name string) (entries []fs.DirEntry, err error) {
	err = v.step("readdir", name, func() error { entries, err = fs.ReadDir(v.patient.host.FS, name); return err })
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
	err = f.view.step("read", f.name, func() error { n, err = f.File.Read(p); return err })
	return n, err
}
