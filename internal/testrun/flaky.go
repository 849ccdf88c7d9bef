package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// flakyOptions are the flags of testrun flaky.
type flakyOptions struct {
	rounds int
	load   int // threads that compute all the time
	race   bool
	short  bool
	run    string // a pattern of tests, as in go test
	jobs   int    // packages at the same time
}

func flakyCommand(ctx context.Context, out io.Writer, args []string) error {
	var o flakyOptions
	flags := flag.NewFlagSet("flaky", flag.ContinueOnError)
	flags.IntVar(&o.rounds, "rounds", 20, "run each package this many times")
	flags.IntVar(&o.load, "load", 12, "run this many threads beside the tests")
	flags.BoolVar(&o.race, "race", false, "build with the race detector")
	flags.BoolVar(&o.short, "short", false, "run the short selection")
	flags.StringVar(&o.run, "run", "", "run only tests that match this pattern")
	flags.IntVar(&o.jobs, "p", runtime.NumCPU(), "run this many packages at the same time")
	if err := flags.Parse(args); err != nil {
		return err
	}
	return runFlaky(ctx, out, o, flags.Args())
}

// A testProgram is the compiled test of a package.
type testProgram struct{ pkg, dir, path string }

// tries counts the runs of one test, or of one package if the test is empty.
type tries struct{ runs, failures int }

// runFlaky runs the tests of packages several times beside a load, and prints how often each test
// failed. Each round runs new processes. The programs are built only once.
func runFlaky(ctx context.Context, out io.Writer, o flakyOptions, patterns []string) error {
	dir, err := os.MkdirTemp("", "testrun-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	programs, err := compileTests(ctx, dir, o, patterns)
	if err != nil {
		return err
	}
	stop := startLoad(ctx, o.load)
	defer stop()
	counts := make(map[record]*tries)
	for round := 1; round <= o.rounds; round++ {
		begin := time.Now()
		failures := runRound(ctx, out, o, programs, counts)
		if ctx.Err() != nil {
			break
		}
		fmt.Fprintf(out, "round %d of %d: %d failures, %s\n", round, o.rounds, failures, time.Since(begin).Round(time.Second))
	}
	return errors.Join(context.Cause(ctx), printTries(out, o, len(programs), counts))
}

// compileTests compiles the test programs of packages into a directory.
func compileTests(ctx context.Context, dir string, o flakyOptions, patterns []string) ([]testProgram, error) {
	list := exec.CommandContext(ctx, goProgram(), append([]string{"list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}\t{{.Dir}}{{end}}"}, patterns...)...)
	list.Stderr = os.Stderr
	output, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var programs []testProgram
	for line := range strings.Lines(string(output)) {
		pkg, source, _ := strings.Cut(strings.TrimSpace(line), "\t")
		p := testProgram{pkg: pkg, dir: source, path: filepath.Join(dir, strconv.Itoa(len(programs)))}
		compile := exec.CommandContext(ctx, goProgram(), "test", "-c", "-ldflags=-s -w", "-race="+strconv.FormatBool(o.race), "-o", p.path, pkg)
		if out, err := compile.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("compile the tests of %s: %w\n%s", pkg, err, out)
		}
		programs = append(programs, p)
	}
	return programs, nil
}

// startLoad starts threads that compute until stop is called. The threads belong to this process,
// so that no load is left when this process ends in any way.
func startLoad(ctx context.Context, threads int) (stop func()) {
	before := runtime.GOMAXPROCS(threads + 2) // two more to read the output of tests
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	for range threads {
		all.Go(func() {
			for ctx.Err() == nil {
			}
		})
	}
	return func() {
		cancel()
		all.Wait()
		runtime.GOMAXPROCS(before)
	}
}

// runRound runs each program once, and returns the number of failed programs.
func runRound(ctx context.Context, out io.Writer, o flakyOptions, programs []testProgram, counts map[record]*tries) (failures int) {
	var lock sync.Mutex // of out, counts and failures
	var all sync.WaitGroup
	slots := make(chan struct{}, max(o.jobs, 1))
	for _, program := range programs {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			output, results, err := runProgram(ctx, o, program)
			lock.Lock()
			defer lock.Unlock()
			if ctx.Err() != nil { // The test was interrupted.
				return
			}
			for _, r := range results {
				c := counts[record{Package: r.Package, Test: r.Test}]
				if c == nil {
					c = new(tries)
					counts[record{Package: r.Package, Test: r.Test}] = c
				}
				c.runs++
				if r.Result == failed {
					c.failures++
				}
			}
			if err != nil {
				failures++
				fmt.Fprintf(out, "%sFAIL\t%s: %v\n", output, program.pkg, err)
			}
		})
	}
	all.Wait()
	return failures
}

// runProgram runs the tests of a package, and returns the output of failed tests.
func runProgram(ctx context.Context, o flakyOptions, program testProgram) (output string, results []record, err error) {
	args := []string{"tool", "test2json", "-p", program.pkg, program.path, "-test.v=test2json", "-test.paniconexit0", "-test.timeout=60m"}
	if o.short {
		args = append(args, "-test.short")
	}
	if o.run != "" {
		args = append(args, "-test.run="+o.run)
	}
	cmd := exec.Command(goProgram(), args...)
	cmd.Dir = program.dir
	var events, text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &events, &events
	err = runGroup(ctx, cmd, gracePeriod)
	p := newPrinter(&text, func(r ...record) error {
		results = append(results, r...)
		return nil
	})
	err = errors.Join(err, p.readAll(&events))
	return text.String(), results, err
}

// printTries prints the failed tests. The error is not nil if there are any.
func printTries(out io.Writer, o flakyOptions, packages int, counts map[record]*tries) error {
	byFailures := func(a, b record) int {
		return cmp.Or(cmp.Compare(counts[b].failures, counts[a].failures), cmp.Compare(a.Package, b.Package), cmp.Compare(a.Test, b.Test))
	}
	fmt.Fprintf(out, "\nFailures in %d rounds of %d packages beside a load of %d:\n", o.rounds, packages, o.load)
	tests, total := 0, 0
	for _, r := range slices.SortedFunc(maps.Keys(counts), byFailures) {
		if r.Test != "" {
			tests++
		}
		if c := counts[r]; c.failures > 0 {
			total++
			fmt.Fprintf(out, "  %d of %d  %s %s\n", c.failures, c.runs, r.Package, cmp.Or(r.Test, "(the package)"))
		}
	}
	if total == 0 {
		fmt.Fprintf(out, "  none of %d tests\n", tests)
		return nil
	}
	return errors.New("tests failed")
}
