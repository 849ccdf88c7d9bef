package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// testModule writes a module with three packages: good passes and skips tests, bad fails, and
// panics ends in the middle of a test.
func testModule(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{
		"go.mod":            "module example.com\n\ngo 1.24\n",
		"good/good_test.go": "package good\n\nimport \"testing\"\n\nfunc TestPasses(t *testing.T) { t.Log(\"silent\") }\n\nfunc TestSkips(t *testing.T) { t.Skip(\"needs root\") }\n\nfunc TestElsewhere(t *testing.T) { t.Run(\"part\", func(t *testing.T) { t.Skip(\"see make simulate\") }) }\n",
		"bad/bad_test.go":   "package bad\n\nimport \"testing\"\n\nfunc TestFails(t *testing.T) { t.Run(\"part\", func(t *testing.T) { t.Error(\"the reason\") }) }\n\nfunc TestPasses(t *testing.T) { t.Log(\"silent\") }\n",
		"panics/p_test.go":  "package panics\n\nimport \"testing\"\n\nfunc TestPanics(t *testing.T) { panic(\"the cause\") }\n",
	}
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
}

func TestGoTestPrintsPackagesAndFailures(t *testing.T) {
	testModule(t)
	records := recordFile(filepath.Join(t.TempDir(), "results"))
	var out bytes.Buffer
	err := runGoTest(t.Context(), &out, records, []string{"./..."})
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) {
		t.Errorf("got error %v, want that of go test", err)
	}
	for _, want := range []string{"ok  \texample.com/good\t", "FAIL\texample.com/bad\t", "FAIL\texample.com/panics\t", "--- FAIL: TestFails/part", "bad_test.go:5: the reason", "panic: the cause"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	for _, unwanted := range []string{"silent", "=== RUN", "needs root"} {
		if strings.Contains(out.String(), unwanted) {
			t.Errorf("the output has %q", unwanted)
		}
	}
	if t.Failed() {
		t.Logf("output:\n%s", &out)
	}

	all, err := records.read()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range all {
		got = append(got, strings.TrimSpace(fmt.Sprintln(strings.TrimPrefix(r.Package, "example.com/"), r.Test, r.Result, r.Reason)))
	}
	slices.Sort(got)
	want := []string{
		"bad  fail", "bad TestFails fail", "bad TestPasses pass",
		"good  pass", "good TestElsewhere pass", "good TestElsewhere/part skip see make simulate", "good TestPasses pass", "good TestSkips skip needs root",
		"panics  fail", "panics TestPanics fail",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
}

func TestGoTestPrintsEverythingWithV(t *testing.T) {
	testModule(t)
	var out bytes.Buffer
	if err := runGoTest(t.Context(), &out, "", []string{"-v", "./good"}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "silent") || !strings.Contains(out.String(), "=== RUN   TestSkips") {
		t.Errorf("output:\n%s", &out)
	}
}

func TestReportListsWhatWasLeftOut(t *testing.T) {
	t.Setenv(resultsVariable, filepath.Join(t.TempDir(), "results"))
	report := func() string {
		t.Helper()
		var out bytes.Buffer
		if err := run(t.Context(), &out, []string{"report"}); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	if got, want := report(), "PASSED. Nothing was left out.\n"; got != want {
		t.Errorf("without records the report is %q, want %q", got, want)
	}

	records := recordFile(os.Getenv(resultsVariable))
	err := errors.Join(
		records.add(
			record{Package: "chandler.dev/a", Result: passed, Seconds: 20},
			record{Package: "chandler.dev/a", Test: "TestLong", Result: passed, Seconds: 15},
			record{Package: "chandler.dev/a", Test: "TestMounts", Result: skipped, Reason: "needs root"},
			record{Package: "chandler.dev/a", Test: "TestMore", Result: skipped, Reason: "see make simulate"},
		),
		run(t.Context(), io.Discard, []string{"leave-out", "the cluster", "needs root"}),
	)
	if err != nil {
		t.Fatal(err)
	}
	want := `
| seconds | package | its longest tests |
|--:|---|---|
| 20 | chandler.dev/a | TestLong 15 |
| 0 | the other packages | |
| 20 | all, of which several ran at the same time | |

LEFT OUT: needs root: a TestMounts, the cluster
PASSED, except tests that this machine cannot run: 1 lines LEFT OUT above give the reasons.
`
	if diff := cmp.Diff(want, report()); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
}

func TestListOfParts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "parts")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("# comment\n\npage  5 # comment\nskew 30\n")
	got, err := readParts(path)
	want := []part{{"page", 5 * time.Minute}, {"skew", 30 * time.Minute}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(part{})); err != nil || diff != "" {
		t.Errorf("error %v; parts (-want +got):\n%s", err, diff)
	}
	for _, invalid := range []string{"page\n", "page five\n", "page 5 6\n"} {
		write(invalid)
		if _, err := readParts(path); err == nil {
			t.Errorf("no error for %q", invalid)
		}
	}
}

// TestEachPartIsATarget checks that the Makefile has a target for each part.
func TestEachPartIsATarget(t *testing.T) {
	parts, err := readParts("../../.ci/parts")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadFile("../../Makefile"); err != nil { // A change of the file makes Go's cached result outdated.
		t.Fatal(err)
	}
	for _, p := range parts {
		if out, err := exec.CommandContext(t.Context(), "make", "-C", "../..", "--dry-run", p.name).CombinedOutput(); err != nil {
			t.Errorf("make %s: %v\n%s", p.name, err, out)
		}
	}
}

func TestTurns(t *testing.T) {
	parts := []part{{name: "a"}, {name: "b"}, {name: "c"}, {name: "d"}}
	day := func(n int) pass { return pass{Time: time.Date(2026, 11, n, 0, 0, 0, 0, time.UTC)} }
	tests := map[string]struct {
		last     map[string]pass
		rotation int
		want     string
	}{
		"a new machine":              {want: "abcd"},
		"a new machine, another day": {rotation: 6, want: "cdab"},
		"all passed":                 {last: map[string]pass{"a": day(3), "b": day(1), "c": day(4), "d": day(2)}, rotation: 1, want: "bdac"},
		"some passed":                {last: map[string]pass{"a": day(2), "c": day(1)}, rotation: 3, want: "dbca"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := ""
			for _, p := range inTurns(parts, test.last, test.rotation) {
				got += p.name
			}
			if got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

// runParts runs parts of the given minutes with a clock that only the parts advance.
func runParts(t *testing.T, p *passes, limit time.Duration, results map[string]error) (started []string, output string, err error) {
	t.Helper()
	now := time.Date(2026, 11, 26, 0, 0, 0, 0, time.UTC)
	var out bytes.Buffer
	r := partRunner{out: &out, passes: p, now: func() time.Time { return now }}
	if limit > 0 {
		r.deadline = now.Add(limit)
	}
	parts := []part{{"long", 30 * time.Minute}, {"short", 5 * time.Minute}, {"middle", 10 * time.Minute}}
	r.run = func(_ context.Context, _ io.Writer, name string) ([]record, error) {
		started = append(started, name)
		i := slices.IndexFunc(parts, func(p part) bool { return p.name == name })
		now = now.Add(parts[i].estimate)
		if name == "short" && results[name] == nil && results["left out"] != nil {
			return []record{{Reason: "needs root"}}, nil
		}
		return nil, results[name]
	}
	// The context of a part ends at the deadline in real time, which is far away.
	err = r.runAll(t.Context(), parts)
	return started, out.String(), err
}

func TestFailedPartDoesNotStopTheOthers(t *testing.T) {
	p := &passes{last: make(map[string]pass)}
	started, output, err := runParts(t, p, 0, map[string]error{"long": errors.New("exit status 2")})
	if diff := cmp.Diff([]string{"long", "short", "middle"}, started); diff != "" {
		t.Errorf("started (-want +got):\n%s", diff)
	}
	if err == nil || err.Error() != "failed parts: long" {
		t.Errorf("error %v", err)
	}
	for _, want := range []string{
		"  long    FAILED after 30.0 min: exit status 2; last passed: never on this machine\n",
		"  short   passed in 5.0 min; last passed: 2026-11-26 00:35 UTC, ",
	} {
		if !strings.Contains(output, want) {
			t.Errorf("the report lacks %q:\n%s", want, output)
		}
	}
	if _, passed := p.last["long"]; passed {
		t.Error("the failed part has a pass")
	}
}

func TestPartIsOnlyStartedIfTimeIsLeft(t *testing.T) {
	started, output, err := runParts(t, &passes{last: make(map[string]pass)}, 36*time.Minute, nil)
	if diff := cmp.Diff([]string{"long", "short"}, started); err != nil || diff != "" {
		t.Errorf("error %v, started (-want +got):\n%s", err, diff)
	}
	if want := "  middle  not started: 1.0 min of an estimated 10.0 min are left; last passed: never"; !strings.Contains(output, want) {
		t.Errorf("the report lacks %q:\n%s", want, output)
	}
}

func TestIncompletePartIsNoPass(t *testing.T) {
	p := &passes{last: make(map[string]pass)}
	_, output, err := runParts(t, p, 0, map[string]error{"left out": errors.New("some")})
	if want := "  short   incomplete after 5.0 min: LEFT OUT: needs root; last passed: never"; err != nil || !strings.Contains(output, want) {
		t.Errorf("error %v, the report lacks %q:\n%s", err, want, output)
	}
	if _, passed := p.last["short"]; passed {
		t.Error("the incomplete part has a pass")
	}
}

func TestPassesAreKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cache", "passes.json")
	p, err := readPasses(path)
	if err != nil || len(p.last) != 0 {
		t.Fatalf("without a file: %v, %v", p.last, err)
	}
	want := pass{Time: time.Date(2026, 11, 26, 3, 0, 0, 0, time.UTC), Commit: "abc", Duration: time.Minute}
	if err := p.add("page", want); err != nil {
		t.Fatal(err)
	}
	again, err := readPasses(path)
	if diff := cmp.Diff(map[string]pass{"page": want}, again.last); err != nil || diff != "" {
		t.Errorf("error %v, passes (-want +got):\n%s", err, diff)
	}

	if err := os.WriteFile(path, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if p, err = readPasses(path); err == nil {
		t.Error("no error for an invalid file")
	}
	if err := p.add("page", want); err != nil {
		t.Errorf("after an invalid file: %v", err)
	}
}

// TestDeadlineEndsTheGroup ends a shell that ignores SIGTERM, with a child that does not.
func TestDeadlineEndsTheGroup(t *testing.T) {
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cmd := exec.Command("sh", "-c", `trap '' TERM; (trap - TERM; exec sleep 1000) & echo ready; while :; do sleep 1000; done`)
	cmd.Stdout = writer
	done := make(chan error, 1)
	go func() { done <- runGroup(ctx, cmd, 500*time.Millisecond) }()
	if _, err := reader.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel(errTimeout)
	if err := <-done; !errors.Is(err, errTimeout) {
		t.Errorf("got %v, want %v", err, errTimeout)
	}
	_ = writer.Close()
	if _, err := io.Copy(io.Discard, reader); err != nil { // ends when the last process of the group has ended
		t.Error(err)
	}
}

// TestFlaky runs a test that fails in each second round, and one that needs the directory of its
// package.
func TestFlaky(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for name, text := range map[string]string{
		"go.mod":    "module example.com\n\ngo 1.24\n",
		"p_test.go": "package p\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestSecond(t *testing.T) {\n\tif os.Remove(\"before\") == nil {\n\t\tt.Error(\"the reason\")\n\t} else if err := os.WriteFile(\"before\", nil, 0o600); err != nil {\n\t\tt.Fatal(err)\n\t}\n}\n\nfunc TestPasses(t *testing.T) {}\n",
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	err := run(t.Context(), &out, []string{"flaky", "-rounds=4", "-load=1", "./..."})
	if err == nil || err.Error() != "tests failed" {
		t.Errorf("error %v", err)
	}
	for _, want := range []string{"p_test.go:10: the reason", "round 2 of 4: 1 failures", "  2 of 4  example.com TestSecond\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output lacks %q:\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "TestPasses") {
		t.Errorf("the output has TestPasses:\n%s", &out)
	}

	out.Reset()
	if err := run(t.Context(), &out, []string{"flaky", "-rounds=2", "-load=0", "-run=TestPasses", "."}); err != nil || !strings.Contains(out.String(), "  none of 1 tests\n") {
		t.Errorf("error %v, output:\n%s", err, &out)
	}
}
