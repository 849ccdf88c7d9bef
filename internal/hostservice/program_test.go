package hostservice

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/child"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// scanner is a program that prints its process ID, and again at each line of its input.
const scanner = "echo $$; while read line; do echo $$; done"

// scripts returns a function that starts a shell script as a program.
func scripts(t *testing.T, script string) func() (Program, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	return func() (Program, error) { return child.Start(path) }
}

// syncLog is a log that several goroutines use.
type syncLog struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements [io.Writer].
func (l *syncLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns what was logged.
func (l *syncLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// runPrograms serves programs on a real socket, until stop is called or the test ends.
func runPrograms(t *testing.T, programs map[string]func() (Program, error)) (client *Client, logged *syncLog, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	dir, logged, ended := t.TempDir(), &syncLog{}, make(chan error, 1)
	server := NewServer(Config{Host: passthroughtest.New(t).Host(), Programs: programs, Log: log.New(logged, "", 0)})
	go func() { ended <- Run(ctx, dir, server) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	client = NewClient(dir, nil)
	eventually(t, "start", func() error { _, err := client.DescribeService(t.Context()); return err })
	return client, logged, stop
}

// startProgram starts a program by the service, and returns the program with its first line.
func startProgram(t *testing.T, client *Client, name string) (p Program, lines *bufio.Scanner) {
	t.Helper()
	p, err := client.StartProgram(t.Context(), name, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	lines = bufio.NewScanner(p)
	if !lines.Scan() {
		t.Fatalf("no output: %v, %v", lines.Err(), p.Wait())
	}
	return p, lines
}

// hasEnded waits for the end of the process whose ID is a line of output.
func hasEnded(t *testing.T, line string) {
	t.Helper()
	pid, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "end of the program", func() error {
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("process %d: %w", pid, err)
		}
		return nil
	})
}

// Each line of the output arrives when the program has printed it, and each empty line of the input
// arrives at the program. The program ends with the session.
func TestProgram(t *testing.T) {
	client, _, _ := runPrograms(t, map[string]func() (Program, error){"test": scripts(t, scanner)})
	p, lines := startProgram(t, client, "test")
	for range 3 {
		if _, err := io.WriteString(p, "\n"); err != nil || !lines.Scan() {
			t.Fatalf("no scan: %v, %v", err, lines.Err())
		}
	}
	p.Kill()
	hasEnded(t, lines.Text())
	if err := p.Wait(); err == nil {
		t.Error("no reason")
	}
	ctx, cancel := context.WithCancel(t.Context())
	p, err := client.StartProgram(ctx, "test", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if lines = bufio.NewScanner(p); !lines.Scan() {
		t.Fatal(lines.Err())
	}
	cancel()
	hasEnded(t, lines.Text())
}

// A program that ends by itself gives the reason, and its last output arrives.
func TestProgramEnds(t *testing.T) {
	client, _, _ := runPrograms(t, map[string]func() (Program, error){
		"test":    scripts(t, "echo last; echo program: broken >&2; exit 3"),
		"missing": func() (Program, error) { return child.Start("/nowhere/program") },
	})
	p, lines := startProgram(t, client, "test")
	if lines.Text() != "last" || lines.Scan() || lines.Err() != nil {
		t.Errorf("output %q, %v", lines.Text(), lines.Err())
	}
	if reason := p.Wait(); reason.Error() != "it ended: exit status 3: broken" {
		t.Errorf("reason %v", reason)
	}
	if _, err := client.StartProgram(t.Context(), "missing", time.Minute); err == nil || !strings.Contains(err.Error(), "start program missing: fork/exec /nowhere/program") {
		t.Errorf("error %v", err)
	}
}

// A program that the flags of the service do not allow is refused and logged, whatever the client
// sends. So is any input of a program except empty lines, which ends the program.
func TestProgramRefusals(t *testing.T) {
	client, logged, _ := runPrograms(t, map[string]func() (Program, error){"test": scripts(t, scanner)})
	if _, err := client.StartProgram(t.Context(), "other", time.Minute); err == nil || !strings.Contains(err.Error(), `does not run program "other"`) || client.HasProgram(t.Context(), "other", time.Minute) || !client.HasProgram(t.Context(), "test", time.Minute) {
		t.Errorf("error %v", err)
	}
	for _, name := range []string{"other", "sh", "..%2Ftest", strings.Repeat("x", 1<<16)} {
		response, err := Send(t.Context(), client.transport, "http://host"+wire.ProgramsPath+"/"+name, http.MethodPost, "--gpus=/etc")
		if err != nil {
			t.Fatal(err)
		}
		if err := response.Decode(nil); err == nil || response.status != statusRefused || !strings.Contains(logged.String(), "refused: "+err.Error()) {
			t.Errorf("%.20s: status %d, %v, log %s", name, response.status, err, logged.String())
		}
	}
	for _, input := range []string{"--gpus=/etc", "\n\n\x00\n", strings.Repeat("\n", 1<<20) + "x"} {
		p, lines := startProgram(t, client, "test")
		if _, err := io.WriteString(p, input); err != nil && !errors.Is(err, io.ErrClosedPipe) {
			t.Error(err)
		}
		for lines.Scan() {
			t.Log(lines.Text())
		}
		if reason := p.Wait(); !strings.Contains(reason.Error(), "more than empty lines") || lines.Err() != nil {
			t.Errorf("%.20q: reason %v, %v", input, reason, lines.Err())
		}
	}
	if n := strings.Count(logged.String(), "refused: the input of a program"); n != 3 {
		t.Errorf("%d refusals of input are logged", n)
	}
}

// A service runs only some processes of a program at a time. The limit of one program does not
// concern another.
func TestProgramLimit(t *testing.T) {
	client, _, _ := runPrograms(t, map[string]func() (Program, error){"test": scripts(t, scanner), "other": scripts(t, scanner)})
	var running []Program
	for range maxPrograms {
		p, _ := startProgram(t, client, "test")
		running = append(running, p)
	}
	if _, err := client.StartProgram(t.Context(), "test", time.Minute); err == nil || !strings.Contains(err.Error(), "runs program test for 4 agents already") || !errors.Is(err, discovery.ErrTransient) {
		t.Errorf("error %v", err)
	}
	p, _ := startProgram(t, client, "other")
	running = append(running, p)
	running[0].Kill()
	p, _ = startProgram(t, client, "test")
	for _, p := range append(running[1:], p) {
		p.Kill()
	}
}

// hanging is a program that ends only after release is closed.
type hanging struct{ killed, release chan struct{} }

// Read implements [io.Reader].
func (h hanging) Read([]byte) (int, error) { <-h.release; return 0, io.EOF }

// Write implements [io.Writer].
func (hanging) Write(p []byte) (int, error) { return len(p), nil }

// Kill implements [Program].
func (h hanging) Kill() { close(h.killed) }

// Wait implements [Program].
func (h hanging) Wait() error { return errors.New("it ended") }

// No program starts beside a killed process of it that hangs in the kernel. Another program does.
func TestProgramHangs(t *testing.T) {
	h := hanging{make(chan struct{}), make(chan struct{})}
	starts := []func() (Program, error){func() (Program, error) { return h, nil }, scripts(t, scanner)}
	client, _, _ := runPrograms(t, map[string]func() (Program, error){
		"test":  func() (Program, error) { start := starts[0]; starts = starts[1:]; return start() },
		"other": scripts(t, scanner),
	})
	p, err := client.StartProgram(t.Context(), "test", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	p.Kill()
	<-h.killed
	if _, err := client.StartProgram(t.Context(), "test", time.Minute); err == nil || !strings.Contains(err.Error(), "hangs in the kernel") || !errors.Is(err, discovery.ErrTransient) {
		t.Errorf("error %v", err)
	}
	p, _ = startProgram(t, client, "other")
	p.Kill()
	close(h.release)
	p, _ = startProgram(t, client, "test")
	p.Kill()
}

// A service that accepts connections without an answer is as good as none.
func TestSilentService(t *testing.T) {
	dir := t.TempDir()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(dir, wire.Socket))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	client := NewClient(dir, nil)
	if _, err := client.StartProgram(t.Context(), "test", 50*time.Millisecond); !errors.Is(err, ErrAway) || !strings.Contains(err.Error(), "no answer within 50ms") {
		t.Errorf("error %v", err)
	}
	if client.HasProgram(t.Context(), "test", 50*time.Millisecond) {
		t.Error("it has a program")
	}
}

// The end of the service does not wait for programs, and ends them.
func TestServiceEndsPrograms(t *testing.T) {
	client, _, stop := runPrograms(t, map[string]func() (Program, error){"test": scripts(t, scanner)})
	p, lines := startProgram(t, client, "test")
	began := time.Now()
	stop()
	hasEnded(t, lines.Text())
	if lines.Scan() || time.Since(began) > drainLimit/2 {
		t.Errorf("after %s: output %q", time.Since(began), lines.Text())
	}
	if reason := p.Wait(); !strings.Contains(reason.Error(), "signal: killed") {
		t.Errorf("reason %v", reason)
	}
	if _, err := client.StartProgram(t.Context(), "test", time.Minute); !errors.Is(err, ErrAway) {
		t.Errorf("without a service: %v", err)
	}
}

// The programs of a killed service end too, and the agent's error names the service.
func TestKilledServiceEndsPrograms(t *testing.T) {
	k := passthroughtest.At(t, t.TempDir())
	service := startProcess(t, k.Dir, -1)
	defer service.stop()
	client := NewClient(socketDir(k.Dir), nil)
	eventually(t, "start", func() error { _, err := client.DescribeService(t.Context()); return err })
	p, lines := startProgram(t, client, childProgram)
	program := lines.Text()
	if err := syscall.Kill(int(service.pid.Load()), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if lines.Scan() || !errors.Is(lines.Err(), ErrAway) {
		t.Errorf("output %q, error %v", lines.Text(), lines.Err())
	}
	p.Kill()
	hasEnded(t, program)
	eventually(t, "the next service", func() error {
		p, err := client.StartProgram(t.Context(), childProgram, time.Minute)
		if err == nil {
			p.Kill()
		}
		return err
	})
}
