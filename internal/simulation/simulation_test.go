package simulation

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
)

var (
	seed    = flag.Uint64("seed", 0, "the only seed to run")
	runs    = flag.Int("runs", 1, "how often to run it")
	seeds   = flag.Int("seeds", 0, "how many seeds to run; see make simulate")
	first   = flag.Uint64("first", 1, "the first of them")
	verbose = flag.Bool("each", false, "say how long each seed takes")
	stop    = flag.Bool("stop", false, "stop at the first seed that fails")
	out     = flag.String("histories", "", "directory for the histories of seeds that fail")
)

func TestMain(m *testing.M) {
	flag.StringVar(&often, "often", "", "a kind of fault that strikes ten times as often; its seeds are others than those without")
	flag.Parse()
	debug.SetGCPercent(1600) // a world is small and gone soon
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	utilruntime.ErrorHandlers = nil // one of them keeps the time of its last error, and each bubble begins in the year 2000
	m.Run()
}

// TestSimulation runs seeds, or one seed as often as is asked: which goroutine goes
// first is not fixed by the seed. It demands that each kind of fault is seen to
// happen where enough seeds are run.
func TestSimulation(t *testing.T) {
	if *seeds == 0 && *seed == 0 {
		t.Skip("no seeds are asked for: see make simulate")
	}
	if _, err := machines(); err != nil {
		t.Fatal(err)
	}
	all := tally{count: *seeds, seen: make(map[string]int)}
	if *seed != 0 {
		all.count = *runs
	}
	// Worlds share nothing, so that there is one at a time on each processor.
	t.Run("worlds", func(t *testing.T) {
		for range runtime.GOMAXPROCS(0) {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				for {
					run, more := all.next()
					if !more {
						return
					}
					all.simulate(t, run)
				}
			})
		}
	})
	for _, f := range faultKinds() {
		if all.seen[f.name] == 0 && all.count >= enough && *seed == 0 && !t.Failed() {
			t.Errorf("fault %s never happened", f.name)
		}
		t.Logf("%8d %s", all.seen[f.name], f.name)
	}
	for _, why := range all.failed { // again, where it is seen: a long output is cut at its beginning
		t.Log(why)
	}
}

// tally is what came of the worlds that were run.
type tally struct {
	count int // of worlds

	mu     sync.Mutex
	run    int // of them
	seen   map[string]int
	failed []string // which seeds, and why
}

// next returns the number of the next world, and whether there is one.
func (a *tally) next() (run int, more bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	run = a.run
	a.run++
	return run, run < a.count
}

// simulate runs one world, and says what was wrong in it.
func (a *tally) simulate(t *testing.T, run int) {
	number := *first + uint64(run)
	if *seed != 0 {
		number = *seed
	}
	began := time.Now()
	guard := time.AfterFunc(patience, func() { panic(fmt.Sprintf("seed %d does not end", number)) })
	w := simulate(t, number)
	guard.Stop()
	if *verbose {
		t.Logf("seed %d: %d events, %d faults, %d lines, %s", number, w.events, w.struck, len(w.history), time.Since(began).Round(time.Millisecond))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for fault, n := range w.seen {
		a.seen[fault] += n
	}
	switch {
	case len(w.failures) > 0:
		why := fmt.Sprintf("seed %d: %s", number, w.failures[0])
		t.Errorf("%s\n%s\nrepeat it with: make simulate SEED=%d RUNS=100", why, w.kept(number, run), number)
		a.failed = append(a.failed, why)
		if *stop {
			a.run = a.count
		}
	case w.events < 100 || w.struck < 5:
		why := fmt.Sprintf("seed %d: there are %d events and %d faults only", number, w.events, w.struck)
		t.Error(why)
		a.failed = append(a.failed, why)
	}
}

// enough is how many seeds have all kinds of faults.
const enough = 150

// kept writes the history to a file where that is asked for, and returns what is
// to be said of it.
func (w *World) kept(number uint64, run int) string {
	if *out == "" {
		return w.History()
	}
	name := filepath.Join(*out, fmt.Sprintf("seed-%d-run-%d.txt", number, run))
	if err := os.WriteFile(name, []byte(w.History()), 0o644); err != nil {
		return err.Error()
	}
	return "its history is in " + name
}

func simulate(t *testing.T, number uint64) (w *World) {
	synctest.Test(t, func(*testing.T) {
		w = NewWorld(number)
		w.Run(steps)
	})
	return w
}

// patience is how long a seed may take on a busy machine.
const patience = 5 * time.Minute

// steps is how much happens to a world.
const steps = 110
