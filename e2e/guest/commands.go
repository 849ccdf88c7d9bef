package guest

import (
	"errors"
	"fmt"
	"net/rpc"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"chandler.dev/e2e/guest/inside"
)

// A Result is the exit code and the output of a program.
type Result struct {
	Stdout, Stderr string
	Code           int // -1 after a signal
}

// A Command is a program to run, with its arguments and environment.
type Command struct {
	Args  []string
	Env   []string // in addition to PATH and HOME
	Dir   string
	Stdin string
}

// Run runs a program in the guest and returns its result.
func (g *Guest) Run(t testing.TB, args ...string) Result {
	t.Helper()
	return g.RunCommand(t, Command{Args: args})
}

// RunCommand runs a command in the guest and returns its result.
func (g *Guest) RunCommand(t testing.TB, c Command) Result {
	t.Helper()
	return g.StartCommand(t, c).Wait(t)
}

// Must runs a program in the guest and returns its standard output. If the program fails, the test
// fails.
func (g *Guest) Must(t testing.TB, args ...string) string {
	t.Helper()
	r := g.Run(t, args...)
	if r.Code != 0 {
		t.Fatalf("%s: exit status %d\n%s%s", strings.Join(args, " "), r.Code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// Sh runs a script with dash and returns its standard output. The script ends at the first failed
// command.
func (g *Guest) Sh(t testing.TB, script string) string {
	t.Helper()
	return g.Must(t, "sh", "-euc", script)
}

// Load loads a module. Modules or Carry of the Config must list the module.
func (g *Guest) Load(t testing.TB, module string, parameters ...string) {
	t.Helper()
	g.Must(t, append([]string{"modprobe", module}, parameters...)...)
}

// Mount creates a directory and mounts a file system there.
func (g *Guest) Mount(t testing.TB, source, target, kind, options string) {
	t.Helper()
	g.call(t, "Mount", inside.Mount{Source: source, Target: target, Type: kind, Options: options}, new(inside.Nothing))
}

// ReadFile returns the content of a file of the guest.
func (g *Guest) ReadFile(t testing.TB, path string) string {
	t.Helper()
	var data []byte
	g.call(t, "Read", path, &data)
	return string(data)
}

// WriteFile writes a file of the guest, and creates the parent directories.
func (g *Guest) WriteFile(t testing.TB, path, content string, mode os.FileMode) {
	t.Helper()
	g.call(t, "Write", inside.File{Path: path, Data: []byte(content), Mode: mode}, new(inside.Nothing))
}

// WriteAttribute writes an existing file, such as one in /sys, and returns the error of the guest's
// kernel.
func (g *Guest) WriteAttribute(t testing.TB, path, value string) error {
	t.Helper()
	return g.try(t, "Write", inside.File{Path: path, Data: []byte(value)}, new(inside.Nothing))
}

// A Process is a running program in the guest.
type Process struct {
	PID int // in the guest

	g      *Guest
	name   string
	number int
	done   chan struct{}

	mu             sync.Mutex
	stdout, stderr strings.Builder
	code           int
	err            error // reason why the process is no longer followed
}

// Start starts a program in the guest. The end of the guest also ends the program.
func (g *Guest) Start(t testing.TB, args ...string) *Process {
	t.Helper()
	return g.StartCommand(t, Command{Args: args})
}

// StartCommand starts a command in the guest.
func (g *Guest) StartCommand(t testing.TB, c Command) *Process {
	t.Helper()
	var started inside.Started
	g.call(t, "Start", inside.Command{Args: c.Args, Env: c.Env, Dir: c.Dir, Stdin: []byte(c.Stdin)}, &started)
	p := &Process{PID: started.PID, g: g, name: strings.Join(c.Args, " "), number: started.Process, done: make(chan struct{})}
	go p.follow(g.client)
	return p
}

func (p *Process) follow(client *rpc.Client) {
	defer close(p.done)
	at := inside.Position{Process: p.number}
	for {
		var news inside.News
		err := client.Call(inside.Service+".Follow", at, &news)
		p.mu.Lock()
		p.stdout.Write(news.Stdout)
		p.stderr.Write(news.Stderr)
		p.code, p.err = news.Code, err
		p.mu.Unlock()
		if err != nil || news.Ended {
			return
		}
		at.Stdout += len(news.Stdout)
		at.Stderr += len(news.Stderr)
	}
}

// Output returns the output of the process so far: its standard output followed by its standard
// error.
func (p *Process) Output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stdout.String() + p.stderr.String()
}

// Until waits until the output of the process contains a text. If the process ends before, the test
// fails.
func (p *Process) Until(t testing.TB, text string) {
	t.Helper()
	for !strings.Contains(p.Output(), text) {
		select {
		case <-p.g.lost:
			t.Fatalf("unknown: UNKNOWN: %v", p.g.why)
		case <-p.done:
			if !strings.Contains(p.Output(), text) {
				t.Fatalf("%s ended without %q:\n%s", p.name, text, p.Output())
			}
		case <-t.Context().Done():
			t.Fatalf("%s did not write %q:\n%s", p.name, text, p.Output())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Signal sends the process a signal.
func (p *Process) Signal(t testing.TB, signal syscall.Signal) {
	t.Helper()
	p.g.call(t, "Signal", inside.Signal{Process: p.number, Signal: signal}, new(inside.Nothing))
}

// Stop sends SIGTERM to the process, and returns its result.
func (p *Process) Stop(t testing.TB) Result {
	t.Helper()
	p.Signal(t, syscall.SIGTERM)
	return p.Wait(t)
}

// Wait waits for the end of the process.
func (p *Process) Wait(t testing.TB) Result {
	t.Helper()
	select {
	case <-p.done:
	case <-p.g.lost:
		t.Fatalf("unknown: UNKNOWN, while %s ran: %v", p.name, p.g.why)
	case <-t.Context().Done():
		t.Fatalf("%s did not end", p.name)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		t.Fatalf("unknown: UNKNOWN, while %s ran: %v", p.name, errors.Join(p.err, p.g.qemu.failure()))
	}
	return Result{Stdout: p.stdout.String(), Stderr: p.stderr.String(), Code: p.code}
}

// call calls a method of the guest's server. If the call fails, the test fails.
func (g *Guest) call(t testing.TB, method string, args, reply any) {
	t.Helper()
	if err := g.try(t, method, args, reply); err != nil {
		t.Fatalf("guest: %s: %v", describe(method, args), err)
	}
}

func describe(method string, args any) string {
	switch a := args.(type) {
	case inside.Command:
		return strings.Join(a.Args, " ")
	case inside.File:
		return "write " + a.Path
	default:
		return fmt.Sprintf("%s %v", strings.ToLower(method), args)
	}
}

// try calls a method of the guest's server, and returns the guest's error.
func (g *Guest) try(t testing.TB, method string, args, reply any) error {
	t.Helper()
	call := g.client.Go(inside.Service+"."+method, args, reply, make(chan *rpc.Call, 1))
	select {
	case <-call.Done:
		var refused rpc.ServerError
		if call.Error != nil && !errors.As(call.Error, &refused) {
			t.Fatalf("unknown: UNKNOWN, the guest is gone: %v", errors.Join(call.Error, g.qemu.failure()))
		}
		return call.Error
	case <-g.lost:
		t.Fatalf("unknown: UNKNOWN: %v", g.why)
	case <-t.Context().Done():
		t.Fatalf("the guest did not answer to %s", describe(method, args))
	}
	return nil
}
