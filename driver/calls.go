package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// callLimit is the longest wait of a call, whatever the reason. The kubelet gives up after 45
// seconds (pkg/kubelet/cm/dra/plugin) and would no longer receive the reason.
const callLimit = 40 * time.Second

// inTime returns a context that ends early enough for the call to return the reason of its wait:
// after eight ninths of the caller's deadline, and at most after callLimit.
func inTime(ctx context.Context) (context.Context, context.CancelFunc) {
	limit := callLimit
	if deadline, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(deadline)*8/9)
	}
	return context.WithTimeout(ctx, limit)
}

var errStopping = errors.New("this instance is stopping; another will answer")

// calls holds back the kubelet's calls until the driver is ready, and waits for running calls when
// the driver stops.
type calls struct {
	ready    chan struct{} // closed when calls may proceed
	stopping chan struct{} // closed when no further calls are admitted

	mu         sync.Mutex
	isStopped  bool
	inProgress sync.WaitGroup
}

// begin waits until a call may proceed. The caller must call done when the call has ended, unless
// begin returns an error.
func (c *calls) begin(ctx context.Context) (done func(), err error) {
	c.mu.Lock()
	if c.isStopped {
		c.mu.Unlock()
		return nil, errStopping
	}
	c.inProgress.Add(1)
	c.mu.Unlock()
	if isClosed(c.ready) {
		return c.inProgress.Done, nil
	}
	select {
	case <-c.ready:
		return c.inProgress.Done, nil
	case <-c.stopping:
		err = errStopping
	case <-ctx.Done():
		err = fmt.Errorf("wait for another agent of this node to end, and for the allocation records to be read: %w", ctx.Err())
	}
	c.inProgress.Done()
	return nil, err
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// drainCalls admits no further calls, and returns when all admitted calls have ended.
func (c *calls) drainCalls() {
	c.mu.Lock()
	c.isStopped = true
	close(c.stopping)
	c.mu.Unlock()
	c.inProgress.Wait()
}

// notify sends a value to a channel with a buffer of one, unless the buffer is full.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
