// Package history records what happens in a simulation: a line for each event, the invariants that did
// not hold, and the faults that happened. It decides nothing.
package history

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// History is the history of one simulation. Any goroutine may call its methods.
type History struct {
	start time.Time

	mu       sync.Mutex
	lines    []string
	failures []string
	faults   map[string]int // the number of times that each fault happened
}

// New returns an empty history, which starts now.
func New() *History { return &History{start: time.Now(), faults: make(map[string]int)} }

// Log adds a line.
func (h *History) Log(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lines = append(h.lines, fmt.Sprintf("%10.3f %s", time.Since(h.start).Seconds(), line))
}

// Fail records that an invariant does not hold.
func (h *History) Fail(format string, args ...any) {
	h.Log("FAILURE: "+format, args...)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failures = append(h.failures, fmt.Sprintf(format, args...))
}

// AllFailures returns the descriptions of the invariants that did not hold.
func (h *History) AllFailures() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.failures)
}

// CountFault counts a fault that happened.
func (h *History) CountFault(fault string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults[fault]++
}

// FaultCount returns the total number of times that the given faults happened.
func (h *History) FaultCount(names ...string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, name := range names {
		n += h.faults[name]
	}
	return n
}

// AllFaults returns the number of times that each fault happened. No other goroutine may use the
// history any more.
func (h *History) AllFaults() map[string]int { return h.faults }

// String returns all lines.
func (h *History) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return strings.Join(h.lines, "\n") + "\n"
}
