package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A part is a make target of make test-all.
type part struct {
	name     string
	estimate time.Duration // on a new machine
}

// readParts reads a list with one part in each line: the target and an estimate in minutes.
func readParts(path string) ([]part, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var parts []part
	for lines := bufio.NewScanner(file); lines.Scan(); {
		text, _, _ := strings.Cut(lines.Text(), "#")
		fields := strings.Fields(text)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 2 {
			return nil, fmt.Errorf("%s: %q is not a target and minutes", path, text)
		}
		minutes, err := strconv.Atoi(fields[1])
		if err != nil {
			return nil, fmt.Errorf("%s: minutes of %s: %w", path, fields[0], err)
		}
		parts = append(parts, part{name: fields[0], estimate: time.Duration(minutes) * time.Minute})
	}
	return parts, nil
}

// A pass is a run of a part without a failure.
type pass struct {
	Time     time.Time
	Commit   string
	Duration time.Duration
}

// passes are the last passes of the parts on this machine.
type passes struct {
	path string
	last map[string]pass
}

// passesFile returns the path of the last passes, in the user's cache directory. Without such a
// directory, the path is empty, and nothing is kept.
func passesFile() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return filepath.Join(cache, "chandler-e2e", "passes.json")
}

// readPasses reads the last passes. A missing file has none. After an error, the passes are empty
// and usable.
func readPasses(path string) (*passes, error) {
	p := &passes{path: path, last: make(map[string]pass)}
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &p.last)
	}
	if path == "" || errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	return p, err
}

func (p *passes) add(name string, last pass) error {
	p.last[name] = last
	if p.path == "" {
		return nil
	}
	data, err := json.MarshalIndent(p.last, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(p.path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(p.path+".new", data, 0o644); err != nil {
		return err
	}
	return os.Rename(p.path+".new", p.path)
}

// inTurns returns the parts in the order of their last pass, the oldest first. Parts without a pass
// come first. The rotation selects the first one of these, so that different runs on new machines
// begin with different parts.
func inTurns(parts []part, last map[string]pass, rotation int) []part {
	if len(parts) == 0 {
		return nil
	}
	begin := rotation % len(parts)
	turns := slices.Concat(parts[begin:], parts[:begin])
	slices.SortStableFunc(turns, func(a, b part) int { return last[a.name].Time.Compare(last[b.name].Time) })
	return turns
}

// rotation returns a number that grows with each commit and each day.
func rotation(ctx context.Context) int {
	days := int(time.Now().Unix() / (24 * 60 * 60))
	output, err := exec.CommandContext(ctx, "git", "rev-list", "--count", "HEAD").Output()
	if err != nil {
		return days
	}
	commits, err := strconv.Atoi(strings.TrimSpace(string(output)))
	if err != nil {
		return days
	}
	return days + commits
}

// errTimeout is the error of a part that was ended at the deadline.
var errTimeout = errors.New("ended at the deadline")

// A partRunner runs parts one after another.
type partRunner struct {
	out      io.Writer
	passes   *passes
	rotation int
	deadline time.Time // zero if there is none
	now      func() time.Time
	// run runs the make target with a name, and returns what was left out.
	run func(ctx context.Context, out io.Writer, name string) (leftOut []record, err error)
}

// runAll runs all parts for which there is time before the deadline, and reports at the end. A
// failed part does not stop the others. The error names the failed parts.
func (r partRunner) runAll(ctx context.Context, parts []part) error {
	results := make(map[string]string)
	var failures []string
	for _, p := range inTurns(parts, r.passes.last, r.rotation) {
		if ctx.Err() != nil {
			break
		}
		if left := r.deadline.Sub(r.now()); !r.deadline.IsZero() && left < p.estimate {
			results[p.name] = fmt.Sprintf("not started: %s of an estimated %s are left", minutes(max(left, 0)), minutes(p.estimate))
			continue
		}
		fmt.Fprintf(r.out, "\n=== make %s (last passed: %s)\n", p.name, r.lastPass(p.name))
		begin := r.now()
		leftOut, err := r.runPart(ctx, p.name)
		took := r.now().Sub(begin)
		switch {
		case err != nil:
			results[p.name] = fmt.Sprintf("FAILED after %s: %v", minutes(took), err)
			failures = append(failures, p.name)
		case len(leftOut) > 0:
			results[p.name] = fmt.Sprintf("incomplete after %s: LEFT OUT: %s", minutes(took), leftOut[0].Reason)
		default:
			results[p.name] = "passed in " + minutes(took)
			if err := r.passes.add(p.name, pass{Time: r.now().UTC().Truncate(time.Second), Commit: commit(ctx), Duration: took.Round(time.Second)}); err != nil {
				fmt.Fprintf(r.out, "The pass of %s was not saved: %v\n", p.name, err)
			}
		}
		fmt.Fprintf(r.out, "=== make %s: %s\n", p.name, results[p.name])
	}
	r.report(parts, results)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if len(failures) > 0 {
		return fmt.Errorf("failed parts: %s", strings.Join(failures, ", "))
	}
	return nil
}

func (r partRunner) runPart(ctx context.Context, name string) ([]record, error) {
	if !r.deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, r.deadline.Sub(r.now()), errTimeout)
		defer cancel()
	}
	leftOut, err := r.run(ctx, r.out, name)
	if err != nil && ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return leftOut, err
}

func (r partRunner) report(parts []part, results map[string]string) {
	width := 0
	for _, p := range parts {
		width = max(width, len(p.name))
	}
	fmt.Fprintf(r.out, "\nParts of make test-all:\n")
	for _, p := range parts {
		fmt.Fprintf(r.out, "  %-*s  %s; last passed: %s\n", width, p.name, cmp.Or(results[p.name], "not started"), r.lastPass(p.name))
	}
}

func (r partRunner) lastPass(name string) string {
	last, known := r.passes.last[name]
	if !known {
		return "never on this machine"
	}
	return fmt.Sprintf("%s, %s, in %s", last.Time.Format("2006-01-02 15:04 MST"), last.Commit, minutes(last.Duration))
}

// minutes formats a duration for a table.
func minutes(d time.Duration) string { return fmt.Sprintf("%.1f min", d.Minutes()) }

// commit returns the commit of this checkout.
func commit(ctx context.Context) string {
	output, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return "no commit"
	}
	return strings.TrimSpace(string(output))
}

// runMake runs a target of the Makefile, and returns the records of skipped tests.
func runMake(ctx context.Context, out io.Writer, name string) ([]record, error) {
	dir, err := os.MkdirTemp("", "testrun-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	records := recordFile(filepath.Join(dir, "results"))
	cmd := exec.Command("make", "--no-print-directory", name)
	cmd.Env = append(os.Environ(), resultsVariable+"="+string(records))
	cmd.Stdout, cmd.Stderr = out, out
	if err := runGroup(ctx, cmd, gracePeriod); err != nil {
		return nil, err
	}
	all, err := records.read()
	return leftOut(all), err
}

// gracePeriod is the time that the programs of a part get to remove their clusters.
const gracePeriod = time.Minute

// runGroup runs a command in a process group of its own. When the context ends, all processes of
// the group get SIGTERM. After the grace period, the remaining processes are killed.
func runGroup(ctx context.Context, cmd *exec.Cmd, grace time.Duration) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = grace
	if err := cmd.Start(); err != nil {
		return err
	}
	group := -cmd.Process.Pid
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	_ = syscall.Kill(group, syscall.SIGTERM)
	for begin := time.Now(); time.Since(begin) < grace && syscall.Kill(group, 0) == nil; time.Sleep(100 * time.Millisecond) {
	}
	_ = syscall.Kill(group, syscall.SIGKILL)
	return errors.Join(context.Cause(ctx), <-done)
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
