package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// flock is the lock of a state directory: files that the kernel locks. See
// [agent.Lock].
type flock string

// Acquire implements [agent.Lock].
func (dir flock) Acquire(ctx context.Context) (release func(), err error) {
	file, err := activate(ctx, string(dir))
	if err != nil {
		return nil, err
	}
	return func() { file.Close() }, nil
}

// Awaited implements [agent.Lock].
func (dir flock) Awaited() bool { return awaited(string(dir)) }

// activate returns once this process holds the lock of the state directory. The caller
// closes the file to release the lock. If the process is killed, the kernel does that.
func activate(ctx context.Context, stateDir string) (*os.File, error) {
	name := filepath.Join(stateDir, "active.lock")
	file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("become the active instance: %w", err)
	}
	var waiting *os.File
	defer func() { waiting.Close() }() // to close nil does nothing
	for {
		// The context could not interrupt a blocking flock, so the lock is tried at
		// intervals. That makes a hand-over at most 50 ms longer.
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return file, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			file.Close()
			return nil, fmt.Errorf("become the active instance: lock %s: %w", name, err)
		}
		if waiting == nil {
			// awaited takes this lock for a moment.
			if waiting, err = lockWaiting(stateDir, unix.LOCK_SH); err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
				file.Close()
				return nil, fmt.Errorf("wait to become the active instance: %w", err)
			}
		}
		select {
		case <-ctx.Done():
			file.Close()
			return nil, ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// lockWaiting locks the file that waiting instances share.
func lockWaiting(stateDir string, how int) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(stateDir, "waiting.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), how|unix.LOCK_NB); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// awaited reports whether another instance waits for the active one to let go.
func awaited(stateDir string) bool {
	file, err := lockWaiting(stateDir, unix.LOCK_EX)
	if err == nil {
		file.Close()
	}
	return errors.Is(err, unix.EWOULDBLOCK)
}
