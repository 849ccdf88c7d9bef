// Package informant runs the programs that query vendors' libraries, and lays the answers over the
// file system of the host. It does not interpret the answers: families do.
package informant

import (
	"bufio"
	"bytes"
	"cmp"
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
	"chandler.dev/internal/child"
	"chandler.dev/internal/hostservice"
)

// Informant runs the program of a family and lays the answers over the host's file system, where
// the family finds them. If the program is missing or gives no answer, the family sees only the
// kernel's files.
type Informant struct {
	discovery.Program
	path    string // of the program
	args    []string
	service *hostservice.Client // runs the program, nil if this process does
	host    *hostfs.Overlay
	changed func() // called after a new answer; set by Run

	interval time.Duration // the interval between answers
	silence  time.Duration // how long the program may be silent
	retry    time.Duration // the pause after the program ended; doubled up to maxRetry
	keep     time.Duration // how long the last answer is valid after the program ended

	Family string // the family of the program

	// HeldFiles returns the files that a program inherits while it makes a change, such as the lock of
	// the node. Optional.
	HeldFiles func() []*os.File

	scanRequests chan struct{} // requests a scan from the running program; room for one

	mu       sync.Mutex
	changing map[string]chan struct{} // devices with a running change; closed after it

	answered   func() // closes ready
	ready      chan struct{}
	lastAnswer time.Time // time of the last answer
	lastLogged string    // the last logged reason for the program's end
}

const (
	interval = 10 * time.Second

	// silence is longer than the interval, because a library may have to wake up each device first,
	// which can take seconds per device.
	silence  = 2 * time.Minute
	retry    = time.Second
	maxRetry = time.Minute
	keep     = 2 * time.Minute

	// look is the interval between checks for the kernel driver.
	look = 10 * time.Second

	// onceLimit limits the wait of a command that prints once.
	onceLimit = 10 * time.Second
)

// OverlayInformants returns the informants of a host, and adds their answers to the host's file
// system. Only this machine has informants: they load libraries of the host, and a recorded or
// copied host may come from an untrusted source. A family gets no informant if its answers are
// already in the host's files. A service that is not nil runs the programs that need privilege.
func OverlayInformants(host *discovery.Host, all []*discovery.Family, hostRoot string, service *hostservice.Client) []*Informant {
	if !hostfs.HasProc(host.FS) {
		return nil
	}
	var informants []*Informant
	overlay := hostfs.NewOverlay(host.FS)
	for _, f := range all {
		for _, p := range f.Programs {
			root := host.Roots[f.Name]
			if p.NeedsRoot && root == "" || host.FileExists(p.File) {
				continue
			}
			n := newInformant(*p, p.Name, overlay, p.Args(hostRoot, root))
			n.Family = f.Name
			if p.Service != "" {
				n.service = service
			}
			if n.service == nil {
				n.path = findProgram(p.Name)
			}
			if n.path != "" {
				informants = append(informants, n)
			}
		}
	}
	if len(informants) > 0 {
		host.FS = overlay
	}
	return informants
}

func newInformant(program discovery.Program, path string, host *hostfs.Overlay, args []string) *Informant {
	n := &Informant{
		Program:      program,
		path:         path,
		args:         args,
		host:         host,
		changed:      func() {},
		interval:     cmp.Or(program.Interval, interval),
		silence:      silence,
		retry:        retry,
		keep:         keep,
		scanRequests: make(chan struct{}, 1),
		changing:     make(map[string]chan struct{}),
		ready:        make(chan struct{}),
	}
	n.answered = sync.OnceFunc(func() { close(n.ready) })
	return n
}

// findProgram returns the path of a program in the directory of this one, or else in PATH, or "" if
// there is none.
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

// driverLoaded reports whether the vendor's kernel driver is loaded.
func (n *Informant) driverLoaded() bool {
	_, err := fs.Stat(n.host, strings.TrimPrefix(n.Driver, "/"))
	return err == nil
}

// set lays an answer over the host's file system, or removes the last one.
func (n *Informant) set(text []byte) {
	if n.host.Set(strings.TrimPrefix(n.File, "/"), text) {
		n.changed()
	}
}

// runOnce gets one answer from the program, and lays the answer over the host's file system.
// Without the kernel driver, runOnce does nothing.
func (n *Informant) runOnce(ctx context.Context) error {
	if !n.driverLoaded() {
		return nil
	}
	deadline := fmt.Errorf("no answer in %s", onceLimit)
	ctx, cancel := context.WithTimeoutCause(ctx, onceLimit, deadline)
	defer cancel()
	heard := errors.New("heard it")
	err := n.runSession(ctx, func(text []byte) error {
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

// AskInformants gets one answer from each informant of the host. Failures are written to errOut;
// the family then sees only the kernel's files. In the pod of an agent, the agent's host service
// runs the programs that it has.
func AskInformants(ctx context.Context, host *discovery.Host, all []*discovery.Family, hostRoot string, errOut io.Writer) {
	askInformants(ctx, host, all, hostRoot, hostservice.NewClient(hostservice.DefaultDir, nil), errOut)
}

// askInformants is AskInformants with the client of a host service. Without a program in the service,
// this process runs the program that is installed beside it.
func askInformants(ctx context.Context, host *discovery.Host, all []*discovery.Family, hostRoot string, service *hostservice.Client, errOut io.Writer) {
	for _, n := range OverlayInformants(host, all, hostRoot, service) {
		if n.service != nil && n.driverLoaded() && !service.HasProgram(ctx, n.Service, onceLimit) {
			if n.service, n.path = nil, findProgram(n.Name); n.path == "" {
				continue
			}
		}
		if err := n.runOnce(ctx); err != nil {
			fmt.Fprintf(errOut, "%s was not used: %v\n", n.Library, err)
		}
	}
}

// Ready returns a channel that is closed after the program's first answer, or when there is none
// for now.
func (n *Informant) Ready() <-chan struct{} { return n.ready }

// Run keeps the program running until the context ends, and calls changed after each new answer.
// Each reason for the program's end is logged once.
func (n *Informant) Run(ctx context.Context, changed func()) {
	n.changed = changed
	defer n.answered()
	wait := n.retry
	for ctx.Err() == nil {
		if !n.driverLoaded() {
			n.set(nil)
			n.lastAnswer = time.Time{}
			n.answered()
			pause(ctx, look)
			continue
		}
		err := n.runSession(ctx, func(text []byte) error {
			n.set(text)
			n.lastAnswer, n.lastLogged, wait = time.Now(), "", n.retry
			n.answered()
			return nil
		})
		if ctx.Err() != nil {
			return
		}
		n.answered()
		n.forgetAnswer(err)
		if n.lastLogged != err.Error() {
			n.lastLogged = err.Error()
			klog.FromContext(ctx).Info("A vendor's library is not used", "library", n.Library, "program", n.path, "reason", err)
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

// forgetAnswer replaces the last answer by the reason for its absence, unless the answer is still
// valid or there was none.
func (n *Informant) forgetAnswer(reason error) {
	if !n.lastAnswer.IsZero() && time.Since(n.lastAnswer) >= n.keep {
		n.set(n.Lost(reason))
	}
}

// start starts the program, or lets the host service start it.
func (n *Informant) start(ctx context.Context) (hostservice.Program, error) {
	if n.service != nil {
		return n.service.StartProgram(ctx, n.Service, n.silence)
	}
	return child.Start(n.path, append([]string{"--watch", "--interval=" + n.interval.String()}, n.args...)...)
}

// runSession starts the program and passes each line of its output to hear. It returns the reason
// for the end: the program ended, was silent for too long or wrote an invalid line, hear returned
// an error, or the context ended. At the end, the program is killed, if possible.
func (n *Informant) runSession(ctx context.Context, hear func(text []byte) error) error {
	program, err := n.start(ctx)
	if err != nil {
		return err
	}
	lines, deaf, ended := make(chan []byte), make(chan struct{}), make(chan struct{})
	var end error // valid once ended is closed
	go func() {
		scanner := bufio.NewScanner(program)
		scanner.Buffer(nil, n.MaxSize+1)
		for scanner.Scan() {
			select {
			case lines <- bytes.Clone(scanner.Bytes()):
			case <-deaf:
			}
		}
		close(lines)
		if end = scanner.Err(); end != nil {
			program.Kill()
		}
		if reason := program.Wait(); end == nil {
			end = reason
		}
		close(ended)
	}()
	go n.passRequests(program, deaf)
	reason := n.listen(ctx, lines, hear)
	close(deaf)
	if reason != nil {
		program.Kill()
		n.forgetAnswer(reason)
	}
	if ctx.Err() != nil {
		select {
		case <-ended:
		case <-time.After(time.Second):
		}
		return reason
	}
	// A program that hangs in the kernel cannot be killed. No second one is started beside it, but
	// this process may end.
	select {
	case <-ctx.Done():
	case <-ended:
		if reason == nil {
			reason = end
		}
	}
	return reason
}

// listen passes lines to hear until there are no more, or until a line is invalid. The end of the
// lines is no error.
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
