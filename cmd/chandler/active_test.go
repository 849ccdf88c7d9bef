package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Of two instances, the second becomes active when the first releases the lock.
func TestActivate(t *testing.T) {
	dir := t.TempDir()
	first, err := (&nodeLock{stateDir: dir}).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	second := make(chan error, 1)
	go func() {
		release, err := (&nodeLock{stateDir: dir}).Acquire(t.Context())
		if err == nil {
			release()
		}
		second <- err
	}()
	for !isAwaited(dir) {
		select {
		case err := <-second:
			t.Fatalf("the second did not wait for the first: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	first()
	if err := <-second; err != nil {
		t.Error(err)
	}
	if isAwaited(dir) {
		t.Error("a program is still reported as waiting")
	}
}

// An agent stays the only active one when its state directory is removed and created again. A
// second agent becomes active when the first ends.
func TestActivateInADirectoryThatWasWiped(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "plugins", "chandler.dev")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	first, err := (&nodeLock{stateDir: dir}).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := (&nodeLock{stateDir: dir}).Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("two are active: %v", err)
	}
	first()
	second, err := (&nodeLock{stateDir: dir}).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	second()
}

// Earlier versions of the agent lock only the file. Whichever agent starts first, the other waits
// for it.
func TestActivateBesideAnEarlierAgent(t *testing.T) {
	dir := t.TempDir()
	earlier, err := os.Create(filepath.Join(dir, "active.lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer earlier.Close()
	lock := func() error { return unix.Flock(int(earlier.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
	if err := lock(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := (&nodeLock{stateDir: dir}).Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("two are active: %v", err)
	}
	if err := unix.Flock(int(earlier.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	release, err := (&nodeLock{stateDir: dir}).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if err := lock(); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("the earlier agent does not wait: %v", err)
	}
}

func TestActivateEndsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	first, err := (&nodeLock{stateDir: dir}).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer first()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := (&nodeLock{stateDir: dir}).Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v; want the context's end", err)
	}
}

func TestActivateNamesTheDirectory(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	if _, err := (&nodeLock{stateDir: missing}).Acquire(t.Context()); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("error %v does not name %s", err, missing)
	}
}
