// Command benchcheck checks the ratios on docs/benchmarks.md: see make bench-check.
//
// The table below [heading] has a row for each ratio of two benchmark results. benchcheck runs the
// benchmarks of the table, and fails if a ratio differs from the page by more than a quarter.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

const (
	page    = "docs/benchmarks.md"
	heading = "## Ratios that are checked"
)

// tolerance is the largest accepted quotient of a measured ratio and the ratio on the page. If the page
// has 0, only 0 is accepted.
const tolerance = 1.25

// A result names a benchmark result: a metric of a benchmark of a package.
type result struct{ pkg, benchmark, metric string }

// A row is a row of the table on the page.
type row struct {
	subject       string
	dividend, per result
	ratio         float64
}

func main() {
	count := flag.Int("count", 3, "number of runs of each benchmark; the best result is used")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *count); err != nil {
		fmt.Fprintln(os.Stderr, "bench-check:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, count int) error {
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	rows, err := readTable(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", page, err)
	}
	patterns := make(map[string]map[string]bool) // by package, the benchmarks without their sub-benchmarks
	for _, r := range rows {
		for _, of := range []result{r.dividend, r.per} {
			if patterns[of.pkg] == nil {
				patterns[of.pkg] = make(map[string]bool)
			}
			name, _, _ := strings.Cut(of.benchmark, "/")
			patterns[of.pkg][name] = true
		}
	}
	measured := make(map[result]float64)
	for _, pkg := range slices.Sorted(maps.Keys(patterns)) {
		pattern := "^(" + strings.Join(slices.Sorted(maps.Keys(patterns[pkg])), "|") + ")$"
		fmt.Fprintf(out, "go test -bench '%s' -count %d %s\n", pattern, count, pkg)
		command := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", pattern, "-benchmem", "-count", strconv.Itoa(count), pkg)
		command.Stderr = os.Stderr
		printed, err := command.Output()
		if err != nil {
			return fmt.Errorf("benchmarks of %s: %w\n%s", pkg, err, printed)
		}
		readResults(measured, pkg, printed)
	}
	return compare(out, rows, measured)
}

// code matches a text in backquotes.
var code = regexp.MustCompile("`([^`]+)`")

// readTable returns the rows of the table below the heading. A row has the cells subject, result,
// other result and ratio. A result is a package, a benchmark and a metric, each in backquotes.
func readTable(text string) ([]row, error) {
	_, section, found := strings.Cut(text, heading+"\n")
	if !found {
		return nil, fmt.Errorf("there is no section %q", heading)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	var rows []row
	for line := range strings.Lines(section) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 4 || !strings.Contains(cells[1], "`") {
			continue // text, or the head of the table
		}
		r := row{subject: strings.TrimSpace(cells[0])}
		var err error
		r.dividend, err = parseResult(cells[1])
		if err == nil {
			r.per, err = parseResult(cells[2])
		}
		if err == nil {
			r.ratio, err = strconv.ParseFloat(strings.TrimSpace(cells[3]), 64)
		}
		if err != nil {
			return nil, fmt.Errorf("row %q: %w", r.subject, err)
		}
		rows = append(rows, r)
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("the section %q has no row", heading)
	}
	return rows, nil
}

func parseResult(cell string) (result, error) {
	parts := code.FindAllStringSubmatch(cell, -1)
	if len(parts) != 3 {
		return result{}, fmt.Errorf("%q is not a package, a benchmark and a metric", strings.TrimSpace(cell))
	}
	return result{parts[0][1], "Benchmark" + strings.TrimPrefix(parts[1][1], "Benchmark"), parts[2][1]}, nil
}

// processors matches the number of processors at the end of a benchmark's name.
var processors = regexp.MustCompile(`-\d+$`)

// readResults adds the smallest value of each metric in the output of go test. The format is
// described at golang.org/design/14313-benchmark-format.
func readResults(measured map[result]float64, pkg string, output []byte) {
	lines := bufio.NewScanner(bytes.NewReader(output))
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 4 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		for i := 2; i+1 < len(fields); i += 2 {
			value, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				break
			}
			of := result{pkg, processors.ReplaceAllString(fields[0], ""), fields[i+1]}
			if before, measuredBefore := measured[of]; !measuredBefore || value < before {
				measured[of] = value
			}
		}
	}
}

// compare prints all ratios, and returns an error that lists the ratios beyond the tolerance.
func compare(out io.Writer, rows []row, measured map[result]float64) error {
	var errs []error
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "RATIO\tPAGE\tMEASURED")
	for _, r := range rows {
		dividend, ok := measured[r.dividend]
		per, okPer := measured[r.per]
		if !ok || !okPer || per == 0 {
			errs = append(errs, fmt.Errorf("%s: no result of %s or %s", r.subject, r.dividend, r.per))
			continue
		}
		ratio := dividend / per
		fmt.Fprintf(table, "%s\t%.3g\t%.3g\n", r.subject, r.ratio, ratio)
		if ratio > r.ratio*tolerance || ratio < r.ratio/tolerance {
			errs = append(errs, fmt.Errorf("%s: the page has %.3g, and the benchmarks %.3g", r.subject, r.ratio, ratio))
		}
	}
	return errors.Join(table.Flush(), errors.Join(errs...))
}
