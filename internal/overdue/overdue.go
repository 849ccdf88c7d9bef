// Package overdue limits the wait for calls that may block in the kernel for an unlimited time,
// because of a driver or a process. Blocked calls cannot be canceled, so the caller gives up: the
// call continues in the background, and remains recorded until its end.
package overdue

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Calls records overdue calls by object, such as a PCI function by address. The zero value is
// ready to use.
type Calls struct {
	mu      sync.Mutex
	overdue map[string][]string // descriptions of unfinished calls, by object
}

// Err is wrapped by the error of an overdue call.
var Err = errors.New("has not ended")

// Do calls do and returns the result. After the limit, Do returns an error that wraps [Err],
// such as "a write to the attribute has not ended after 10s", and [Calls.OverdueCall] returns an
// error for the object until the call ends. The caller must not start other calls for the object in
// the meantime.
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
		c.overdue = make(map[string][]string)
	}
	c.overdue[object] = append(c.overdue[object], what)
	go func() {
		<-result //nolint:errcheck // Do has already returned an error
		c.mu.Lock()
		defer c.mu.Unlock()
		i := slices.Index(c.overdue[object], what)
		if c.overdue[object] = slices.Delete(c.overdue[object], i, i+1); len(c.overdue[object]) == 0 {
			delete(c.overdue, object)
		}
	}()
	return fmt.Errorf("%s %w after %s", what, Err, limit)
}

// OverdueCall returns an error that describes the first overdue call of an object, nil if there is
// none.
func (c *Calls) OverdueCall(object string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	late := c.overdue[object]
	if len(late) == 0 {
		return nil
	}
	return fmt.Errorf("%s %w yet", late[0], Err)
}
