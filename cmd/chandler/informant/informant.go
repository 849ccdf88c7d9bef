// Package informant runs the programs that ask vendors' libraries about devices, and
// lays the answers over the file system of the host. It does not read the answers:
// families do.
package informant

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
)

// Informant runs the program of a family and lays the answers over the host's file
// system, where the family finds them. If the program is not there or has nothing
// to say, the host is as the kernel's files tell.
type Informant struct {
	discovery.Program
	path    string // of the program
	args    []string
	host    *hostfs.Overlay
	changed func() // called when the program said something new; set by Run

	interval time.Duration // how often the program is to speak

	silence time.Duration // how long the program may say nothing
	retry   time.Duration // how long to wait when it ended; doubled until it is maxRetry
	keep    time.Duration // how long what it said is believed when it has ended

	settled func() // closes ready
	ready   chan struct{}
	heard   time.Time // when it last said something
	logged  string    // the last reason why it ended
}

const (
	interval = 10 * time.Second

	// silence is longer than the interval, since a library may have to wake up each
	// device first, which may take seconds for each.
	silence  = 2 * time.Minute
	retry    = time.Second
	maxRetry = time.Minute
	keep     = 2 * time.Minute

	// look is how often to see whether the kernel driver was loaded.
	look = 10 * time.Second

	// onceLimit is how long a command that prints once waits.
	onceLimit = 10 * time.Second
)

// Overlay returns the informants of a host, and lets the host's file system take
// their answers. Only this machine has informants: they load libraries of the
// host, and a recorded or copied host may come from anybody. A family whose
// answers are in the host's files already has none either.
func Overlay(host *discovery.Host, all []*discovery.Family, hostRoot string) []*Informant {
	if !hostfs.HasProc(host.FS) {
		return nil
	}
	var informants []*Informant
	overlay := hostfs.NewOverlay(host.FS)
	for _, f := range all {
		if f.Program == nil || host.Exists(f.Program.File) {
			continue
		}
		if found := findProgram(f.Program.Name); found != "" {
			informants = append(informants, newInformant(*f.Program, found, overlay, f.Program.Args(hostRoot, host.Roots[f.Name])))
		}
	}
	if len(informants) > 0 {
		host.FS = overlay
	}
	return informants
}

func newInformant(program discovery.Program, path string, host *hostfs.Overlay, args []string) *Informant {
	n := &Informant{
		Program:  program,
		path:     path,
		args:     args,
		host:     host,
		changed:  func() {},
		interval: interval,
		silence:  silence,
		retry:    retry,
		keep:     keep,
		ready:    make(chan struct{}),
	}
	n.settled = sync.OnceFunc(func() { close(n.ready) })
	return n
}

// findProgram returns the path of a program that lies beside this one, or where
// the shell would find it, "" if there is none.
func findProgram(name string) string {
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), name)
		if path, err := exec.LookPath(beside); err == nil {
			return path
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return ""
	}
	return path
}

// loaded reports whether the vendor's kernel driver is.
func (n *Informant) loaded() bool {
	_, err := fs.Stat(n.host, strings.TrimPrefix(n.Driver, "/"))
	return err == nil
}

// set lays a text over the host's file system, or takes it away.
func (n *Informant) set(text []byte) {
	if n.host.Set(strings.TrimPrefix(n.File, "/"), text) {
		n.changed()
	}
}

// once asks the program one time. What it says is then in the host's file
// system. That the kernel driver is not loaded is no error.
func (n *Informant) once(ctx context.Context) error {
	if !n.loaded() {
		return nil
	}
	deadline := fmt.Errorf("no answer in %s", onceLimit)
	ctx, cancel := context.WithTimeoutCause(ctx, onceLimit, deadline)
	defer cancel()
	heard := errors.New("heard it")
	err := n.session(ctx, func(text []byte) error {
		n.set(text)
		return heard
	})
	switch {
	case errors.Is(err, heard):
		return nil
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	return fmt.Errorf("%s: %w", n.Name, err)
}

// Ask asks each informant of the host once. If one does not answer, errOut is told,
// and the host is as the kernel's files tell.
func Ask(ctx context.Context, host *discovery.Host, all []*discovery.Family, hostRoot string, errOut io.Writer) {
	for _, n := range Overlay(host, all, hostRoot) {
		if err := n.once(ctx); err != nil {
			fmt.Fprintf(errOut, "%s was not asked: %v\n", n.Library, err)
		}
	}
}

// Ready is closed when the program has said something, or when it is known that it
// has nothing to say yet.
func (n *Informant) Ready() <-chan struct{} { return n.ready }

// Run keeps the program running until the context ends, and calls changed whenever
// the program has said something new. The reason why the program ended is logged
// once.
func (n *Informant) Run(ctx context.Context, changed func()) {
	n.changed = changed
	defer n.settled()
	wait := n.retry
	for ctx.Err() == nil {
		if !n.loaded() {
			n.set(nil)
			n.heard = time.Time{}
			n.settled()
			pause(ctx, look)
			continue
		}
		err := n.session(ctx, func(text []byte) error {
			n.set(text)
			n.heard, n.logged, wait = time.Now(), "", n.retry
			n.settled()
			return nil
		})
		if ctx.Err() != nil {
			return
		}
		n.settled()
		n.forget(err)
		if n.logged != err.Error() {
			n.logged = err.Error()
			klog.FromContext(ctx).Info("A vendor's library is not being asked", "library", n.Library, "program", n.path, "reason", err)
		}
		pause(ctx, wait)
		wait = min(2*wait, maxRetry)
	}
}

// pause returns after a time, or when the context ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// forget says that nothing is known any more of what was, unless the program may
// soon be back. If it never said anything, nothing is taken back.
func (n *Informant) forget(reason error) {
	if !n.heard.IsZero() && time.Since(n.heard) >= n.keep {
		n.set(n.Lost(reason))
	}
}

// session starts the program and hands each line that it writes to hear, until
// it ends, is silent for too long, writes nonsense, hear returns an error, or the
// context ends. It returns why, and leaves no program behind that can be ended.
func (n *Informant) session(ctx context.Context, hear func(text []byte) error) error {
	cmd := exec.Command(n.path, append([]string{"--watch", "--interval=" + n.interval.String()}, n.args...)...)
	said := &head{}
	cmd.Stderr = said
	stdin, err := cmd.StdinPipe() // the program ends when it is closed, as when this one dies
	if err != nil {
		return err
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lines, deaf, ended := make(chan []byte), make(chan struct{}), make(chan struct{})
	var end error // once ended is closed
	go func() {
		scanner := bufio.NewScanner(stdout)
		scanner.Buffer(nil, n.MaxSize+1)
		for scanner.Scan() {
			select {
			case lines <- bytes.Clone(scanner.Bytes()):
			case <-deaf:
			}
		}
		close(lines)
		end = errors.Join(scanner.Err(), cmd.Wait())
		close(ended)
	}()
	reason := n.listen(ctx, lines, hear)
	close(deaf)
	if reason != nil {
		_ = cmd.Process.Kill()
		n.forget(reason)
	}
	if ctx.Err() != nil {
		select {
		case <-ended:
		case <-time.After(time.Second):
		}
		return reason
	}
	// One that hangs in the kernel cannot be ended, and no second one is started
	// beside it; only this process may end before it.
	select {
	case <-ctx.Done():
	case <-ended:
		if reason == nil {
			reason = n.ending(end, said.text)
		}
	}
	return reason
}

// listen hears lines until there are no more, which is no error, or something
// is wrong with them.
func (n *Informant) listen(ctx context.Context, lines <-chan []byte, hear func([]byte) error) error {
	silence := time.NewTimer(n.silence)
	defer silence.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-silence.C:
			return fmt.Errorf("silent for %s", n.silence)
		case text, more := <-lines:
			if !more {
				return nil
			}
			if err := n.Check(string(text)); err != nil {
				return err
			}
			if err := hear(text); err != nil {
				return err
			}
			silence.Reset(n.silence)
		}
	}
}

// head keeps the beginning of what a program writes to its standard error.
type head struct{ text []byte }

func (h *head) Write(p []byte) (int, error) {
	const enough = 512
	h.text = append(h.text, p[:min(len(p), enough-len(h.text))]...)
	return len(p), nil
}

// ending returns why a program ended: how, and the first line of what it wrote.
func (n *Informant) ending(err error, said []byte) error {
	line, _, _ := strings.Cut(strings.TrimSpace(string(said)), "\n")
	line = strings.TrimPrefix(line, n.Name+": ")
	if err == nil {
		return fmt.Errorf("it ended: %s", line)
	}
	return fmt.Errorf("it ended: %w: %s", err, line)
}
