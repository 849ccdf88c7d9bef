// Package prometheus evaluates queries and rules on the agent's metrics, with Prometheus' own
// engine and promtool. The metrics are the golden files of the agent's handler and samples of other
// exporters.
package prometheus

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/storage"
)

const (
	root    = "../../"
	metrics = root + "cmd/chandler/agent/telemetry/testdata/metrics"
	page    = root + "docs/metrics.md"
	rules   = root + "deployments/prometheus/rules.yaml"
	grafana = root + "deployments/grafana/chandler.json"
)

var update = flag.Bool("update", false, "write golden files")

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// exposed returns the contents of the metrics files, by the instance that Prometheus would scrape.
func exposed(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob(metrics + "/*.prom")
	if err != nil || len(files) < 3 {
		t.Fatalf("%v, %v", files, err)
	}
	texts := map[string]string{"dcgm": read(t, "testdata/dcgm.prom"), "amd": read(t, "testdata/amd.prom")}
	for _, file := range files {
		texts[strings.TrimSuffix(filepath.Base(file), ".prom")] = read(t, file)
	}
	return texts
}

var sample = regexp.MustCompile(`^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)$`)

// scraped returns a storage that has scraped all instances once a minute for two hours, and the
// names of the metrics. All samples of an instance have the same values.
func scraped(t *testing.T) (storage.Storage, map[string]bool) {
	t.Helper()
	names := make(map[string]bool)
	load := strings.Builder{}
	load.WriteString("load 1m\n")
	for instance, text := range exposed(t) {
		for line := range strings.Lines(text) {
			line = strings.TrimSpace(line)
			if line == "" || strings.HasPrefix(line, "#") {
				continue
			}
			m := sample.FindStringSubmatch(line)
			if m == nil {
				t.Fatalf("%s: %q is no sample", instance, line)
			}
			names[m[1]] = true
			of := fmt.Sprintf("instance=%q", instance)
			if m[2] != "" {
				of = m[2] + "," + of
			}
			fmt.Fprintf(&load, "  %s{%s} %sx120\n", m[1], of, m[3])
		}
	}
	return promqltest.LoadedStorage(t, load.String()), names
}

// ask evaluates a query two hours after the first scrape.
func ask(t *testing.T, from storage.Storage, query string) promql.Vector {
	t.Helper()
	engine := promqltest.NewTestEngine(t, false, 5*time.Minute, 1_000_000)
	asked, err := engine.NewInstantQuery(t.Context(), from, nil, query, time.Unix(0, 0).Add(2*time.Hour))
	if err != nil {
		t.Fatalf("%v in\n%s", err, query)
	}
	defer asked.Close()
	result := asked.Exec(context.WithoutCancel(t.Context()))
	if result.Err != nil {
		t.Fatalf("%v in\n%s", result.Err, query)
	}
	vector, err := result.Vector()
	if err != nil {
		t.Fatalf("%v in\n%s", err, query)
	}
	return vector
}

// named are the labels that matter to users.
var named = []string{"node", "device", "model", "namespace", "pod", "container", "claim", "resource", "api", "capacity"}

// say formats a query's result in a fixed order, with the labels of named.
func say(vector promql.Vector) string {
	lines := make([]string, 0, len(vector))
	for _, s := range vector {
		var words []string
		s.Metric.Range(func(l labels.Label) {
			if slices.Contains(named, l.Name) && l.Value != "" {
				words = append(words, l.Name+"="+l.Value)
			}
		})
		lines = append(lines, fmt.Sprintf("  %s: %g\n", strings.Join(words, " "), s.F))
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

var inDocs = regexp.MustCompile("(?s)```promql\n(.*?)```")

// TestQueriesOfDocumentation evaluates each query of the documentation. All metrics must exist, and
// the results must match the golden file.
func TestQueriesOfDocumentation(t *testing.T) {
	from, names := scraped(t)
	queries := inDocs.FindAllStringSubmatch(read(t, page), -1)
	if len(queries) < 10 {
		t.Fatalf("%d queries", len(queries))
	}
	got := strings.Builder{}
	for _, q := range queries {
		exist(t, q[1], names)
		answer := ask(t, from, q[1])
		if len(answer) == 0 {
			t.Errorf("no answer to\n%s", q[1])
		}
		fmt.Fprintf(&got, "%s\n%s\n", strings.TrimSpace(q[1]), say(answer))
	}
	golden := "testdata/queries.golden"
	if *update {
		if err := os.WriteFile(golden, []byte(got.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if want := read(t, golden); want != got.String() {
		t.Errorf("got, see -update:\n%s\nwant:\n%s", got.String(), want)
	}
}

// exist reports metrics of a query that no exporter has.
func exist(t *testing.T, query string, names map[string]bool) {
	t.Helper()
	parsed, err := parser.NewParser(parser.Options{}).ParseExpr(query)
	if err != nil {
		t.Errorf("%v in\n%s", err, query)
		return
	}
	parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
		if s, ok := node.(*parser.VectorSelector); ok && !names[s.Name] {
			t.Errorf("there is no metric %q: %s", s.Name, query)
		}
		return nil
	})
}

// mayBeEmpty are the panels that show nothing on healthy nodes.
var mayBeEmpty = []string{"Features that the API server drops"}

// TestDashboard evaluates each query of the dashboard. All metrics must exist, and each query must
// have a result.
func TestDashboard(t *testing.T) {
	var dashboard struct {
		Panels []struct {
			Title   string
			Type    string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal([]byte(read(t, grafana)), &dashboard); err != nil {
		t.Fatal(err)
	}
	from, names := scraped(t)
	asked := 0
	for _, panel := range dashboard.Panels {
		if panel.Type != "row" && len(panel.Targets) == 0 {
			t.Errorf("panel %q asks nothing", panel.Title)
		}
		for _, target := range panel.Targets {
			query := strings.NewReplacer("$node", ".*", "$__rate_interval", "5m").Replace(target.Expr)
			exist(t, query, names)
			if len(ask(t, from, query)) == 0 && !slices.Contains(mayBeEmpty, panel.Title) {
				t.Errorf("panel %q shows nothing: %s", panel.Title, query)
			}
			asked++
		}
	}
	if asked < 20 {
		t.Errorf("%d queries", asked)
	}
}

// TestPromtool checks the rules, runs the tests of the alerts, and checks that the agent's metrics
// follow Prometheus' conventions.
func TestPromtool(t *testing.T) {
	tool := filepath.Join(t.TempDir(), "promtool")
	// Without the tag, promtool includes the libraries of all clouds.
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-tags", "remove_all_sd", "-o", tool, "github.com/prometheus/prometheus/cmd/promtool").CombinedOutput(); err != nil {
		t.Fatalf("build promtool: %v: %s", err, out)
	}
	run := func(stdin string, arguments ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), tool, arguments...)
		cmd.Stdin = strings.NewReader(stdin)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v:\n%s", strings.Join(arguments, " "), err, out)
		}
	}
	run("", "check", "rules", "--lint=all", "--lint-fatal", rules)
	run("", "test", "rules", "testdata/alerts.yaml")
	for instance, text := range exposed(t) {
		if instance != "dcgm" && instance != "amd" {
			run(text, "check", "metrics")
		}
	}
}

var (
	alertName = regexp.MustCompile(`(?m)^ *- alert: (\w+)$`)
	ruleExpr  = regexp.MustCompile(`(?m)^ *expr: (.*)$`)
	recorded  = regexp.MustCompile(`(?m)^ *- record: (\S+)$`)
)

// TestAlerts expects each alert to have labels, annotations, a section in the documentation and a
// test. The metrics of all rules must exist.
func TestAlerts(t *testing.T) {
	text, docs, tests := read(t, rules), read(t, page), read(t, "testdata/alerts.yaml")
	alerts := alertName.FindAllStringSubmatchIndex(text, -1)
	if len(alerts) < 8 {
		t.Fatalf("%d alerts", len(alerts))
	}
	for i, at := range alerts {
		name, end := text[at[2]:at[3]], len(text)
		if i+1 < len(alerts) {
			end = alerts[i+1][0]
		}
		for _, wanted := range []string{"severity:", "summary:", "description:", "for:", "runbook_url: https://chandler.dev/docs/metrics.md#" + strings.ToLower(name) + "\n"} {
			if !strings.Contains(text[at[0]:end], wanted) {
				t.Errorf("alert %s lacks %q", name, wanted)
			}
		}
		if !strings.Contains(docs, "\n### "+name+"\n") {
			t.Errorf("alert %s has no section in the documentation", name)
		}
		if !strings.Contains(tests, "alertname: "+name+"\n") {
			t.Errorf("alert %s is not tested", name)
		}
	}
	_, names := scraped(t)
	names["chandler_scan_late"] = true // Healthy nodes do not have this metric.
	for _, m := range recorded.FindAllStringSubmatch(text, -1) {
		names[m[1]] = true
	}
	for _, m := range ruleExpr.FindAllStringSubmatch(text, -1) {
		exist(t, m[1], names)
	}
}

// TestSamplesAreThere guards the other tests against files without samples.
func TestSamplesAreThere(t *testing.T) {
	for instance, text := range exposed(t) {
		if !bytes.Contains([]byte(text), []byte("# TYPE ")) {
			t.Errorf("%s has no metrics", instance)
		}
	}
}
