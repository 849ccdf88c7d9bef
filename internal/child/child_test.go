package child

import (
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// start starts a shell script as a program.
func start(t *testing.T, script string) *Process {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	p, err := Start(path)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The reason for the end has the exit status and the first line of standard error, without the
// program's name.
func TestEndReason(t *testing.T) {
	for script, want := range map[string]string{
		"echo program: broken >&2; echo more >&2; exit 3": "it ended: exit status 3: broken",
		"head -c 100000 /dev/zero | tr '\\0' x >&2":       "it ended: " + strings.Repeat("x", 512),
		"": "it ended: ",
	} {
		p := start(t, "echo output; "+script)
		output, err := io.ReadAll(p)
		if reason := p.Wait(); err != nil || string(output) != "output\n" || reason == nil || reason.Error() != want {
			t.Errorf("output %q, %v; reason %v, want %s", output, err, reason, want)
		}
	}
	if _, err := Start(filepath.Join(t.TempDir(), "missing")); err == nil {
		t.Error("a missing program starts")
	}
}

// A child process of the program does not delay the end.
func TestGrandchild(t *testing.T) {
	p := start(t, "sleep 3600 >/dev/null & echo $!")
	output, err := io.ReadAll(p)
	if reason := p.Wait(); err != nil || reason == nil {
		t.Errorf("%v, reason %v", err, reason)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(output)))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
}

// Kill ends the program, and unblocks a write that the program does not read.
func TestKill(t *testing.T) {
	p := start(t, "exec sleep 3600")
	written := make(chan struct{})
	go func() {
		defer close(written)
		for {
			if _, err := p.Write(make([]byte, 1<<16)); err != nil {
				return
			}
		}
	}()
	p.Kill()
	<-written
	if _, err := io.ReadAll(p); err != nil {
		t.Error(err)
	}
	if reason := p.Wait(); !strings.Contains(reason.Error(), "signal: killed") {
		t.Errorf("reason %v", reason)
	}
}
