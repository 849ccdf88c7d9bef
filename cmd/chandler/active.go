package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// nodeLock is the lock of a state directory, see [agent.Lock]. It locks a file in the directory and
// the directory's parent. If the state directory is removed and created again while an agent is
// active, the next agent finds another file, but the same parent. Earlier versions of the agent
// lock only the file.
type nodeLock struct {
	stateDir string
	files    atomic.Pointer[[]*os.File] // the locked files, nil before Acquire
}

// Acquire implements [agent.Lock]. It blocks until this process has the lock. If the process is
// killed, the kernel releases the lock, unless a program has inherited the locked files.
func (l *nodeLock) Acquire(ctx context.Context) (release func(), err error) {
	file, err := os.OpenFile(filepath.Join(l.stateDir, "active.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("become the active instance: %w", err)
	}
	parent, err := os.Open(filepath.Dir(l.stateDir))
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("become the active instance: %w", err)
	}
	release = func() { parent.Close(); file.Close() }
	if err := lockAll(ctx, l.stateDir, file, parent); err != nil {
		release()
		return nil, err
	}
	l.files.Store(&[]*os.File{file, parent})
	return release, nil
}

// Awaited implements [agent.Lock].
func (l *nodeLock) Awaited() bool { return isAwaited(l.stateDir) }

// lockedFiles returns the locked files for a program that keeps the lock until it has ended, none
// before Acquire.
func (l *nodeLock) lockedFiles() []*os.File {
	if files := l.files.Load(); files != nil {
		return *files
	}
	return nil
}

// lockAll locks files in order.
func lockAll(ctx context.Context, stateDir string, files ...*os.File) error {
	var waiting *os.File
	defer func() { waiting.Close() }() // closing nil does nothing
	for len(files) > 0 {
		// The context could not interrupt a blocking flock, so lockAll polls. A switch between
		// agents takes at most 50 ms longer.
		err := unix.Flock(int(files[0].Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			files = files[1:]
			continue
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("become the active instance: lock %s: %w", files[0].Name(), err)
		}
		if waiting == nil {
			// awaited takes this lock for a moment.
			if waiting, err = lockWaiting(stateDir, unix.LOCK_SH); err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
				return fmt.Errorf("wait to become the active instance: %w", err)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
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

// isAwaited reports whether another instance waits for the lock of the active one.
func isAwaited(stateDir string) bool {
	file, err := lockWaiting(stateDir, unix.LOCK_EX)
	if err == nil {
		file.Close()
	}
	return errors.Is(err, unix.EWOULDBLOCK)
}
