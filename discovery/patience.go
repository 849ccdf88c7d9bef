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

// patient reads a host of which any file may never answer: a driver may hold a
// lock that it never gives back. The kernel cannot be told to end such a read.
// So each reading is a goroutine of its own, which is left alone if it hangs.
type patient struct {
	host     *Host
	patience time.Duration
	again    chan struct{} // has one when a scan may now find more than the last one

	mu   sync.Mutex // for writers of hung
	hung atomic.Pointer[[]*hang]
}

// hang is a read that does not end.
type hang struct {
	step
	of   *view
	what string // the directory of a PCI function, or else the file
}

// stops reports whether a step is not to be taken beside the read that hangs. The
// kernel answers by itself what links and directory entries there are, so these
// can be looked at unless it is one of them that hangs.
func (h *hang) stops(op, file string) bool {
	return h.what == hangUnit(file) && (!isLook(op) || isLook(h.op))
}

func isLook(op string) bool { return op == "stat" || op == "lstat" || op == "readlink" }

func newPatient(host *Host, patience time.Duration) *patient {
	p := &patient{host: host, patience: patience, again: make(chan struct{}, 1)}
	p.hung.Store(&[]*hang{})
	return p
}

// hangUnit returns what is not read while a read of the file hangs: all of its
// PCI function, since one file after the other would hang.
func hangUnit(file string) string {
	if function, ok := sysfs.At(nil, file).PCIFunction(); ok {
		return function.Path
	}
	return file
}

// stops reports whether a step is not to be taken, since it would hang.
func (p *patient) stops(op, file string) bool {
	return slices.ContainsFunc(*p.hung.Load(), func(h *hang) bool { return h.stops(op, file) })
}

// hanging returns a problem for each PCI function of which a read hangs.
func (p *patient) hanging() (problems []Problem) {
	for _, h := range *p.hung.Load() {
		if function := sysfs.At(nil, h.what); sysfs.IsPCIAddress(function.Name()) {
			problems = append(problems, Problem{DeviceName(function), fmt.Errorf("%s %s: %w", h.op, h.file, ErrHangs)})
		}
	}
	return problems
}

// change replaces the list of reads that hang.
func (p *patient) change(change func([]*hang) []*hang) {
	p.mu.Lock()
	defer p.mu.Unlock()
	hung := change(slices.Clone(*p.hung.Load()))
	p.hung.Store(&hung)
}

// notify says that another scan may find more.
func (p *patient) notify() {
	select {
	case p.again <- struct{}{}:
	default:
	}
}

// leave gives the view's reading up if one read has kept it for half of the
// patience or longer, and reports whether it has. The device that hangs is then
// not read until that read ends.
func (p *patient) leave(v *view) bool {
	if !p.suspect(v, p.patience/2) {
		return false
	}
	v.left.Store(true)
	return true
}

// suspect reports whether one read has kept a view for so long. Nothing else of the
// device is read then, by any view, until that read ends.
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

// answered forgets that a read of the view hung.
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

// await returns what is read of the host. It is read again without what hangs,
// until it can be, or the context ends, which is reported.
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

	found T    // once it has ended
	late  bool // it is waited for no longer
}

// begin begins to read the host.
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

// wait waits for the end of the reading and reports whether it has ended.
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

// view is the host's file system as one reading sees it. It knows what is being
// read, and refuses what hangs, and everything once the reading was left.
type view struct {
	patient *patient
	ended   chan struct{} // closed when the reading has ended
	left    atomic.Bool

	mu sync.Mutex
	at step // zero between two steps
}

// where says what is being done, for a message.
func (v *view) where() string {
	at := v.now()
	if at.op == "" {
		return ""
	}
	return fmt.Sprintf(" (%s %s)", at.op, at.file)
}

// step is what is being done.
type step struct {
	op, file string
	since    time.Time
}

// ErrHangs is the error of a read that the kernel does not end.
var ErrHangs = errors.New("does not answer")

// step does one thing that may hang.
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

// now returns what is being done.
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
