// Package chance draws what happens by chance in a simulation.
package chance

import (
	"math/rand/v2"
	"sync"
	"time"
)

// Chance is a random source for all goroutines.
type Chance struct {
	mu     sync.Mutex
	random *rand.Rand
}

// New returns a random source that only the returned value may use.
func New(random *rand.Rand) *Chance { return &Chance{random: random} }

// OneIn is true with probability 1/n.
func (c *Chance) OneIn(n int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.random.IntN(n) == 0
}

// UpTo returns a duration below the longest.
func (c *Chance) UpTo(longest time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Duration(c.random.Int64N(int64(longest)))
}

// PickOne returns one of several values.
func PickOne[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }
