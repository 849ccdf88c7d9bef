package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// The results of packages and tests.
const (
	passed  = "pass"
	failed  = "fail"
	skipped = "skip"
)

// A record is the result of one package, or of one test of the package.
type record struct {
	Package string
	Test    string  `json:",omitempty"`
	Result  string  // passed, failed or skipped
	Seconds float64 `json:",omitempty"`
	Cached  bool    `json:",omitempty"` // the result is from Go's cache
	Reason  string  `json:",omitempty"` // why a test was skipped
}

// recordFile is the path of the file with the records. If the path is empty, nothing is recorded.
type recordFile string

// add appends records to the file. Several processes may append at the same time, because each
// record is one short write.
func (f recordFile) add(records ...record) error {
	if f == "" {
		return nil
	}
	file, err := os.OpenFile(string(f), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	for _, r := range records {
		line, err := json.Marshal(r)
		if err == nil {
			_, err = file.Write(append(line, '\n'))
		}
		if err != nil {
			return errors.Join(err, file.Close())
		}
	}
	return file.Close()
}

// read returns all records. A missing file has none.
func (f recordFile) read() ([]record, error) {
	file, err := os.Open(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer file.Close()
	var all []record
	for decoder := json.NewDecoder(file); ; {
		var r record
		if err := decoder.Decode(&r); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return all, fmt.Errorf("read %s: %w", f, err)
		}
		all = append(all, r)
	}
}

// shortestTime is the duration of the shortest package and test in the table of times.
const shortestTime = 10 * time.Second

// printTimes prints a table with the longest packages, and the longest tests of each.
func printTimes(out io.Writer, all []record) {
	seconds := make(map[string]float64) // of the runs of each package
	tests := make(map[string][]record)
	total := 0.0
	for _, r := range all {
		switch {
		case r.Test == "" && !r.Cached:
			seconds[r.Package] += r.Seconds
			total += r.Seconds
		case r.Test != "" && r.Seconds >= shortestTime.Seconds():
			tests[r.Package] = append(tests[r.Package], r)
		}
	}
	if total == 0 {
		return
	}
	fmt.Fprintf(out, "\n| seconds | package | its longest tests |\n|--:|---|---|\n")
	packages := slices.SortedFunc(maps.Keys(seconds), func(a, b string) int {
		return cmp.Or(cmp.Compare(seconds[b], seconds[a]), strings.Compare(a, b))
	})
	rest := 0.0
	for _, p := range packages {
		if seconds[p] < shortestTime.Seconds() {
			rest += seconds[p]
			continue
		}
		longest := slices.SortedFunc(slices.Values(tests[p]), func(a, b record) int { return cmp.Compare(b.Seconds, a.Seconds) })
		var texts []string
		for _, t := range longest[:min(5, len(longest))] {
			texts = append(texts, fmt.Sprintf("%s %.0f", t.Test, t.Seconds))
		}
		fmt.Fprintf(out, "| %.0f | %s | %s |\n", seconds[p], p, strings.Join(texts, ", "))
	}
	fmt.Fprintf(out, "| %.0f | the other packages | |\n| %.0f | all, of which several ran at the same time | |\n\n", rest, total)
}

// leftOut returns the records of skipped tests. It does not return tests whose reason names the
// make target that runs them, because these tests belong to another target.
func leftOut(all []record) []record {
	var left []record
	for _, r := range all {
		if r.Result == skipped && !strings.Contains(r.Reason, "make ") {
			left = append(left, r)
		}
	}
	return left
}

// printLeftOut prints the tests that were left out, by reason.
func printLeftOut(out io.Writer, all []record) {
	names := make(map[string][]string)
	for _, r := range leftOut(all) {
		name := strings.TrimPrefix(r.Package, "chandler.dev/")
		if r.Test != "" {
			name += " " + r.Test
		}
		reason := cmp.Or(r.Reason, "no reason given")
		if !slices.Contains(names[reason], name) {
			names[reason] = append(names[reason], name)
		}
	}
	if len(names) == 0 {
		fmt.Fprintln(out, "PASSED. Nothing was left out.")
		return
	}
	for _, reason := range sortedKeys(names) {
		fmt.Fprintf(out, "LEFT OUT: %s: %s\n", reason, strings.Join(names[reason], ", "))
	}
	fmt.Fprintf(out, "PASSED, except tests that this machine cannot run: %d lines LEFT OUT above give the reasons.\n", len(names))
}
