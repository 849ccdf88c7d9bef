package ledger

import (
	"context"
	"sync"
)

// turn is a mutex as a channel. In a simulation the clock advances while a goroutine waits for a
// turn, but not during a wait for a sync.Mutex: a simulated disk may be slow.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

// takeTurn waits for the turn.
func (t turn) takeTurn() (done func()) {
	t <- struct{}{}
	return func() { <-t }
}

// locks has a lock per key. A caller can wait for a lock with a context. The zero value is ready to
// use.
type locks struct {
	mu    sync.Mutex
	taken map[string]chan struct{} // closed on release
}

// lock takes the lock of a key, or returns the context's error.
func (l *locks) lock(ctx context.Context, key string) (unlock func(), err error) {
	for {
		unlock, other := l.tryLock(key)
		if other == nil {
			return unlock, nil
		}
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// tryLock takes the lock of a key. If the lock is taken, tryLock returns a channel that is closed
// on release.
func (l *locks) tryLock(key string) (unlock func(), other <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if other, taken := l.taken[key]; taken {
		return nil, other
	}
	if l.taken == nil {
		l.taken = make(map[string]chan struct{})
	}
	released := make(chan struct{})
	l.taken[key] = released
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.taken, key)
		close(released)
	}, nil
}
