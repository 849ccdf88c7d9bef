package main

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Of two instances one is active, and the other when that has let go.
func TestActivate(t *testing.T) {
	dir := t.TempDir()
	first, err := activate(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	second := make(chan error, 1)
	go func() {
		file, err := activate(t.Context(), dir)
		if err == nil {
			file.Close()
		}
		second <- err
	}()
	for !awaited(dir) {
		select {
		case err := <-second:
			t.Fatalf("the second did not wait for the first: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	first.Close()
	if err := <-second; err != nil {
		t.Error(err)
	}
	if awaited(dir) {
		t.Error("somebody is said to wait still")
	}
}

func TestActivateEndsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	first, err := activate(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := activate(ctx, dir); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v; want the context's end", err)
	}
}

func TestActivateNamesTheDirectory(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	if _, err := activate(t.Context(), missing); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("error %v does not name %s", err, missing)
	}
}
