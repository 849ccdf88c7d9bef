package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

// An event is a line of go test -json: see go doc test2json.
type event struct {
	Action     string
	Package    string
	ImportPath string // of a failed build
	Test       string
	Elapsed    float64
	Output     string
}

// runGoTest runs go test with the given arguments. It prints what go test prints without -json: one
// line for each package, and the output of failed tests.
func runGoTest(ctx context.Context, out io.Writer, records recordFile, args []string) error {
	cmd := exec.CommandContext(ctx, goProgram(), append([]string{"test", "-json"}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p := newPrinter(out, records.add)
	p.verbose = isVerbose(args)
	readErr := p.readAll(stdout)
	if readErr != nil {
		_, _ = io.Copy(io.Discard, stdout) // Otherwise go test would wait for a reader.
	}
	if err := cmd.Wait(); err != nil {
		return err
	}
	return readErr
}

// goProgram returns the go command, which the Makefile exports.
func goProgram() string { return cmp.Or(os.Getenv("GO"), "go") }

func isVerbose(args []string) bool {
	if end := slices.Index(args, "-args"); end >= 0 {
		args = args[:end]
	}
	return slices.Contains(args, "-v")
}

// A printer prints the events of go test, and records the results.
type printer struct {
	out      io.Writer
	record   func(...record) error
	verbose  bool // print all output
	packages map[string]*packageRun
}

func newPrinter(out io.Writer, record func(...record) error) *printer {
	return &printer{out: out, record: record, packages: make(map[string]*packageRun)}
}

// A packageRun is the state of one package while its tests run.
type packageRun struct {
	started bool                // the first test has begun
	outputs map[string][]string // by test; "" has the output between tests
	cached  bool
}

func (p *printer) readAll(in io.Reader) error {
	for reader := bufio.NewReader(in); ; {
		line, err := reader.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				fmt.Fprintf(p.out, "%s", line)
			} else if err := p.handle(e); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func (p *printer) handle(e event) error {
	if e.Action == "build-output" {
		fmt.Fprint(p.out, e.Output)
		return nil
	}
	r := p.packages[e.Package]
	if r == nil {
		r = &packageRun{outputs: make(map[string][]string)}
		p.packages[e.Package] = r
	}
	switch e.Action {
	case "run":
		r.started = true
	case "output":
		p.output(r, e)
	case passed, failed, skipped:
		return p.end(r, e)
	}
	return nil
}

// summary matches the lines of go test about a whole package.
var summary = regexp.MustCompile(`^(ok|\?|---|FAIL)? *\t`)

func (p *printer) output(r *packageRun, e event) {
	whole := e.Test == "" && summary.MatchString(e.Output)
	if whole && strings.Contains(e.Output, "\t(cached)") {
		r.cached = true
	}
	switch {
	case p.verbose:
		fmt.Fprint(p.out, e.Output)
	case whole && strings.HasPrefix(e.Output, "FAIL"): // after the output that explains the failure
		r.outputs[""] = append(r.outputs[""], e.Output)
	case whole, e.Test == "" && !r.started && e.Output != "PASS\n": // TestMain prints progress before the first test
		fmt.Fprint(p.out, e.Output)
	case !strings.HasPrefix(e.Output, "=== ") && (e.Test != "" || e.Output != "PASS\n"):
		r.outputs[e.Test] = append(r.outputs[e.Test], e.Output)
	}
}

// end prints the output of a failed package or test, and records the result.
func (p *printer) end(r *packageRun, e event) error {
	output := r.outputs[e.Test]
	delete(r.outputs, e.Test)
	if e.Action == failed && !p.verbose {
		if e.Test == "" { // Tests without an end explain a panic, or a timeout.
			for _, test := range sortedKeys(r.outputs) {
				fmt.Fprint(p.out, strings.Join(r.outputs[test], ""))
			}
		}
		fmt.Fprint(p.out, strings.Join(output, ""))
	}
	if e.Test == "" && e.Action == skipped { // a package without tests
		return nil
	}
	result := record{Package: e.Package, Test: e.Test, Result: e.Action, Seconds: e.Elapsed, Cached: r.cached}
	if e.Action == skipped {
		result.Reason = reason(output)
	} else if strings.Contains(e.Test, "/") {
		return nil // The parent has the result.
	}
	return p.record(result)
}

// position matches the place of a message in a test.
var position = regexp.MustCompile(`^\s*\w+\.go:\d+: `)

// reason returns the message of a skipped test.
func reason(output []string) string {
	var texts []string
	for _, line := range output {
		if text := strings.TrimSpace(position.ReplaceAllString(line, "")); text != "" && !strings.HasPrefix(text, "--- ") {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, " ")
}
