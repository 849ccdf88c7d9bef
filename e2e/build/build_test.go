package build

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestStatic(t *testing.T) {
	b := Builder{Cache: t.TempDir()}
	first, err := b.Static(t.Context(), ".", "chandler.dev/e2e/cmd/pause")
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(first)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Static(t.Context(), ".", "chandler.dev/e2e/cmd/pause"); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(first)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(before, after) {
		t.Error("the second build wrote the program again")
	}
}

// The agent's version is the version of the checkout, as with make build.
func TestAgentSaysItsVersion(t *testing.T) {
	want, err := exec.CommandContext(t.Context(), "git", "describe", "--tags", "--always", "--dirty").Output()
	if err != nil {
		t.Skipf("this checkout is not git's: %v", err)
	}
	agent, err := Builder{Cache: t.TempDir()}.Agent(t.Context(), "../..")
	if err != nil {
		t.Fatal(err)
	}
	said, err := exec.CommandContext(t.Context(), agent, "version").Output()
	if err != nil || !strings.HasPrefix(string(said), "chandler "+strings.TrimSpace(string(want))+" go") {
		t.Errorf("%v, %q, want version %s", err, said, want)
	}
}

func TestBuildReportsErrors(t *testing.T) {
	_, err := Builder{Cache: t.TempDir()}.Static(t.Context(), ".", "chandler.dev/e2e/cmd/missing")
	if err == nil || !strings.Contains(err.Error(), "cmd/missing") {
		t.Errorf("got %v", err)
	}
}

func TestUnknownVersion(t *testing.T) {
	_, err := Builder{Cache: t.TempDir()}.kube(t.Context(), "v1.0.0")
	if err == nil || !strings.Contains(err.Error(), "v1.0.0") {
		t.Errorf("got %v", err)
	}
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := Lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Lock(ctx, path); err == nil {
		t.Fatal("locked twice")
	}
	unlock()
	unlock, err = Lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	unlock()
}

func TestFindIn(t *testing.T) {
	empty, full := t.TempDir(), t.TempDir()
	for _, name := range []string{"ptp", "loopback"} {
		if err := os.WriteFile(filepath.Join(full, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	got, err := findIn([]string{empty, full}, "ptp", "loopback")
	if want := filepath.Join(full, "ptp"); err != nil || got != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
	if _, err := findIn([]string{empty, full}, "ptp", "host-local"); err == nil {
		t.Error("found a directory that has not all")
	}
}

// Prebuilt programs are used without a Go toolchain, and a missing program is an error with its
// name.
func TestPrebuilt(t *testing.T) {
	dir := t.TempDir()
	names := []string{"base", "machine", "pause", "probe", "containerd-shim-runc-v2", "kube", "runc", "loopback", "ptp", "host-local", "chandler", "kubectl-chandler", "helm", "nvml/chandler-host"}
	for _, name := range names {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755), os.WriteFile(filepath.Join(dir, name), nil, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", "")
	t.Setenv("CHANDLER_E2E_PROGRAMS", dir)
	var b Builder
	programs, err := b.Cluster(t.Context())
	if want := (Programs{Dir: dir, Kube: "kube", Runc: dir, CNI: dir}); err != nil || programs != want {
		t.Errorf("got %+v, %v; want %+v", programs, err, want)
	}
	for name, find := range map[string]func() (string, error){
		"chandler":           func() (string, error) { return b.Agent(t.Context(), "../..") },
		"kubectl-chandler":   func() (string, error) { return b.Plugin(t.Context(), "../..") },
		"helm":               func() (string, error) { return b.Helm(t.Context()) },
		"nvml/chandler-host": func() (string, error) { return b.NVML(t.Context(), "../..") },
	} {
		if got, err := find(); err != nil || got != filepath.Join(dir, name) {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
	}
	if _, err := b.DeviceManager(t.Context()); err == nil || !strings.Contains(err.Error(), "devicemanager") {
		t.Errorf("a missing program: %v", err)
	}
}
