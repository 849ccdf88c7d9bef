package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// callLimit is how long a call waits at most for whatever it waits for. The
// kubelet gives up after 45 seconds (pkg/kubelet/cm/dra/plugin) and then hears
// no reason any more.
const callLimit = 40 * time.Second

// inTime returns a context for what a call waits for: it ends while there is
// time left to tell the caller what that was, eight ninths into what the caller
// waits, which for the kubelet is callLimit.
func inTime(ctx context.Context) (context.Context, context.CancelFunc) {
	limit := callLimit
	if deadline, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(deadline)*8/9)
	}
	return context.WithTimeout(ctx, limit)
}

var errStopping = errors.New("this instance is stopping; another will answer")

// calls lets the kubelet's calls in once the driver is ready, and waits for
// them when it stops.
type calls struct {
	ready    chan struct{} // closed when calls may go on
	stopping chan struct{} // closed when no more are let in

	mu      sync.Mutex
	stopped bool
	running sync.WaitGroup
}

// begin waits until a call may go on. The caller must call done when it has
// ended, unless there is an error.
func (c *calls) begin(ctx context.Context) (done func(), err error) {
	c.mu.Lock()
	if c.stopped {
		c.mu.Unlock()
		return nil, errStopping
	}
	c.running.Add(1)
	c.mu.Unlock()
	if closed(c.ready) {
		return c.running.Done, nil
	}
	select {
	case <-c.ready:
		return c.running.Done, nil
	case <-c.stopping:
		err = errStopping
	case <-ctx.Done():
		err = fmt.Errorf("wait for another agent of this node to let go, and for what is prepared to be read: %w", ctx.Err())
	}
	c.running.Done()
	return nil, err
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// drain lets no more calls in and returns when those that were have ended.
func (c *calls) drain() {
	c.mu.Lock()
	c.stopped = true
	close(c.stopping)
	c.mu.Unlock()
	c.running.Wait()
}
