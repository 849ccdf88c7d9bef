// Package overdue calls what the kernel may not come back from for as long as a driver or a process
// likes. Nobody can tell the kernel to give up, so the caller does: the call goes on alone, and it is
// known of what it is until it ends.
package overdue

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// Calls are calls of objects, such as PCI functions by their addresses. The zero value is ready to use.
type Calls struct {
	// Ended is called when a call has ended that nobody waited for any more. It must not block. Optional.
	Ended func()

	mu      sync.Mutex
	overdue map[string]string // what has not ended, by object
}

// Err is wrapped by the error of a call that has not ended in time.
var Err = errors.New("has not ended")

// Do calls do and returns what that returns. If it takes longer than the limit, Do returns an error that
// wraps [Err], such as "a write to the attribute has not ended after 10s", and the object is [Calls.Of] it
// until it ends. It is for the caller to begin nothing else of the object meanwhile.
func (c *Calls) Do(limit time.Duration, object, what string, do func() error) error {
	result := make(chan error, 1)
	go func() { result <- do() }()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case err := <-result:
		return err
	case <-timer.C:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.overdue == nil {
		c.overdue = make(map[string]string)
	}
	c.overdue[object] = what
	go func() {
		<-result //nolint:errcheck // nobody waits for it any more
		c.mu.Lock()
		delete(c.overdue, object)
		c.mu.Unlock()
		if c.Ended != nil {
			c.Ended()
		}
	}()
	return fmt.Errorf("%s %w after %s", what, Err, limit)
}

// Of returns an error that says what of an object has not ended yet, nil if nothing.
func (c *Calls) Of(object string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	what, late := c.overdue[object]
	if !late {
		return nil
	}
	return fmt.Errorf("%s %w yet", what, Err)
}
