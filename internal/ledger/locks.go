package ledger

import (
	"context"
	"sync"
)

// turn is had by one at a time. While somebody waits for it, a simulation's clock
// goes on, which it does not for a mutex: a disk may be slow.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

// take returns once nobody else has the turn.
func (t turn) take() (done func()) {
	t <- struct{}{}
	return func() { <-t }
}

// locks has a lock for each key, which can be waited for with a context. The
// zero value is ready to use.
type locks struct {
	mu    sync.Mutex
	taken map[string]chan struct{} // closed when let go
}

// lock returns once nobody else has the key, or with the context's error.
func (l *locks) lock(ctx context.Context, key string) (unlock func(), err error) {
	for {
		unlock, other := l.try(key)
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

// try takes the lock of a key, or returns what is closed when it is let go.
func (l *locks) try(key string) (unlock func(), other <-chan struct{}) {
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
