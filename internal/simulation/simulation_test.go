package simulation

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"

	"chandler.dev/internal/simulation/machine"
)

var (
	seed    = flag.Uint64("seed", 0, "the only seed to run")
	runs    = flag.Int("runs", 1, "how often to run it")
	seeds   = flag.Int("seeds", 0, "how many seeds to run; see make simulate")
	first   = flag.Uint64("first", 1, "the first of them")
	verbose = flag.Bool("each", false, "print how long each seed takes")
	out     = flag.String("histories", "", "directory for the histories of seeds that fail")
	world   = flag.Uint64("world", 0, "run the world of this seed in this process; see TestWorld")
)

func TestMain(m *testing.M) {
	flag.Func("often", "a kind of fault that strikes ten times as often; its seeds are others than those without", func(name string) error {
		if names := drawnFaults(); name != "" && !slices.Contains(names, name) {
			return fmt.Errorf("the faults are %s", strings.Join(names, ", "))
		}
		often = name
		return nil
	})
	flag.Parse()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	utilruntime.ErrorHandlers = nil // one handler keeps the time of its last error, and each bubble begins in the year 2000
	m.Run()
}

// TestSimulation runs several seeds, or one seed several times. If enough seeds are run, each kind
// of fault must happen.
func TestSimulation(t *testing.T) {
	if *seeds == 0 && *seed == 0 {
		t.Skip("no seeds are asked for: see make simulate")
	}
	all := tally{program: deliberate{}.build(t), often: often, first: *first, count: *seeds}
	if *seed != 0 {
		all.first, all.count, all.same = *seed, *runs, true
	}
	all.run(t)
	for _, f := range faultKinds() {
		if all.seen[f.name] == 0 && (f.weight > 0 || f.strike == nil) && all.count >= enough && !all.same && len(all.failed) == 0 {
			t.Errorf("fault %s never happened", f.name)
		}
		t.Logf("%8d %s", all.seen[f.name], f.name)
	}
	if all.same && len(all.histories) > 1 {
		t.Errorf("seed %d has %d histories", all.first, len(all.histories))
	}
	for _, f := range all.failed {
		t.Errorf("seed %d: %s\nits history: %s\nrepeat it with: make simulate SEED=%[1]d RUNS=1", f.seed, f.why, f.history)
	}
}

// tally holds the settings and the results of a series of worlds.
type tally struct {
	program string // the program that runs a world
	often   string // the kind of fault that strikes ten times as often
	first   uint64 // first seed
	count   int    // number of worlds
	same    bool   // all worlds have the first seed
	stop    bool   // stop at the first failure

	mu        sync.Mutex
	next      int
	seen      map[string]int
	failed    []failure
	histories map[string]int // the number of worlds with each history, by hash
}

// failure is a failed seed and the reason.
type failure struct {
	seed         uint64
	why, history string
}

// run runs the worlds, one at a time on each processor.
func (a *tally) run(t *testing.T) {
	a.seen, a.histories = make(map[string]int), make(map[string]int)
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for {
				a.mu.Lock()
				number := a.first
				if !a.same {
					number += uint64(a.next)
				}
				a.next++
				more := a.next <= a.count && (!a.stop || len(a.failed) == 0)
				a.mu.Unlock()
				if !more {
					return
				}
				a.simulate(t, number)
			}
		})
	}
	workers.Wait()
	slices.SortFunc(a.failed, func(a, b failure) int { return cmp.Compare(a.seed, b.seed) })
}

// simulate runs one world in a separate process.
func (a *tally) simulate(t *testing.T, number uint64) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	began := time.Now()
	command := exec.CommandContext(ctx, a.program, "-test.run", "^TestWorld$", "-test.v", "-test.timeout", "0", "-world", fmt.Sprint(number), "-often", a.often)
	// The arguments and the environment are the same wherever the seed runs: they shift the
	// addresses on the heap, which determine the order of maps of pointers.
	command.Args[0], command.Env = "simulation.test", environment
	printed, err := command.CombinedOutput()
	o := outcome{}
	_, text, _ := strings.Cut(string(printed), outcomeMark)
	text, _, _ = strings.Cut(text, "\n")
	switch decoded := json.Unmarshal([]byte(text), &o); {
	case ctx.Err() != nil:
		o.Why = "it does not end"
	case err != nil || decoded != nil:
		o.Why, o.History = fmt.Sprintf("the process failed: %v: %.300s", errors.Join(err, decoded), crash.Find(printed)), string(printed)
	case o.Why == "" && (o.Events < 100 || o.Struck < 5):
		o.Why = fmt.Sprintf("there are %d events and %d faults only", o.Events, o.Struck)
	}
	if *verbose {
		t.Logf("seed %d: %d events, %d faults, history %s, %s", number, o.Events, o.Struck, o.Hash, time.Since(began).Round(time.Millisecond))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.histories[o.Hash]++
	for fault, n := range o.Seen {
		a.seen[fault] += n
	}
	if o.Why != "" {
		a.failed = append(a.failed, failure{number, o.Why, kept(number, o)})
	}
}

// outcome is the result that a process prints for its world.
type outcome struct {
	Why, History   string // of a failure
	Hash           string // of the history
	Events, Struck int
	Seen           map[string]int
}

// crash matches the output of a process that crashes.
var crash = regexp.MustCompile(`(?s)(panic|fatal error): .*`)

const outcomeMark = "outcome: "

// TestWorld runs one world in this process, and prints the outcome.
func TestWorld(t *testing.T) {
	if *world == 0 {
		t.Skip("TestSimulation runs this in processes of its own")
	}
	if _, err := machine.All(); err != nil {
		t.Fatal(err)
	}
	var (
		w      *World
		result Result
	)
	cryptotest.SetGlobalRandom(t, *world)
	synctest.Test(t, func(*testing.T) {
		seedScheduler(*world)
		w = NewWorld(*world)
		result = w.Run(steps)
	})
	sum := sha256.Sum256([]byte(w.history.String()))
	o := outcome{Hash: hex.EncodeToString(sum[:6]), Events: result.Steps, Struck: result.Struck, Seen: w.history.AllFaults()}
	if len(w.history.AllFailures()) > 0 {
		o.Why, o.History = w.history.AllFailures()[0], w.history.String()
	}
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s%s", outcomeMark, text)
}

// TestOneHistory checks that a seed always has the same history, while the machine runs other
// worlds.
func TestOneHistory(t *testing.T) {
	if *seeds == 0 {
		t.Skip("no seeds are asked for: see make simulate")
	}
	program := deliberate{}.build(t)
	for number := range uint64(10) {
		all := tally{program: program, first: *first + number, count: 6, same: true}
		all.run(t)
		if len(all.histories) != 1 {
			t.Errorf("seed %d has these histories, with how often: %v", all.first, all.histories)
		}
	}
}

// enough is the number of seeds that together have all kinds of faults.
const enough = 150

// kept writes a history to a file and returns the path. Without a directory for histories, kept
// returns the history.
func kept(number uint64, o outcome) string {
	if *out == "" {
		return o.History
	}
	name := filepath.Join(*out, fmt.Sprintf("seed-%d-%s.txt", number, o.Hash))
	if err := os.WriteFile(name, []byte(o.History), 0o644); err != nil {
		return err.Error()
	}
	return name
}

// patience is the time limit for a seed on a busy machine.
const patience = 5 * time.Minute

// steps is the number of steps of a world.
const steps = 110
