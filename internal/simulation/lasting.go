package simulation

import (
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"chandler.dev/internal/simulation/history"
)

// lasting holds the faults that go on for a time. Any goroutine may call goesOn; the root goroutine
// calls the other methods.
type lasting struct {
	random  *rand.Rand
	history *history.History

	mu      sync.Mutex
	ongoing map[string]ongoing
}

// ongoing is a fault that ends by itself.
type ongoing struct {
	until time.Time
	end   func()
}

// startFault makes a fault last for a random time up to longest, and then calls end.
func (l *lasting) startFault(name string, longest time.Duration, end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ongoing[name] = ongoing{time.Now().Add(time.Duration(l.random.Int64N(int64(longest)))), end}
}

// goesOn reports whether a fault goes on.
func (l *lasting) goesOn(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, goes := l.ongoing[name]
	return goes
}

// endFaults ends the faults whose time is over.
func (l *lasting) endFaults(now time.Time) {
	l.mu.Lock()
	var ends []string
	for name, o := range l.ongoing {
		if !now.Before(o.until) {
			ends = append(ends, name)
		}
	}
	l.mu.Unlock()
	slices.Sort(ends)
	for _, name := range ends {
		l.mu.Lock()
		o := l.ongoing[name]
		delete(l.ongoing, name)
		l.mu.Unlock()
		l.history.Log("fault ends: %s", name)
		o.end()
	}
}

// dropFaults ends faults early, without calling their end functions.
func (l *lasting) dropFaults(names ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.ongoing, func(name string, _ ongoing) bool { return slices.Contains(names, name) })
}
