package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"chandler.dev/internal/docs"
)

// aValue is a value of the chart, as values.yaml explains it.
type aValue struct{ name, text string }

// key is a line of values.yaml that begins a value.
var key = regexp.MustCompile(`^( *)([A-Za-z]+):`)

// explained returns the values that have an explanation, in order.
func explained(text string) (values []aValue) {
	var path, comment []string
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if said, is := strings.CutPrefix(strings.TrimSpace(line), "#"); is {
			comment = append(comment, strings.TrimSpace(said))
			continue
		}
		if found := key.FindStringSubmatch(line); found != nil {
			path = append(path[:len(found[1])/2], found[2])
			if said, is := strings.CutPrefix(strings.Join(comment, " "), "-- "); is {
				values = append(values, aValue{strings.Join(path, "."), said})
			}
		}
		comment = nil
	}
	return values
}

// docs/install.md has every value of values.yaml, with its default and what it is for, and the schema knows it.
func TestValuesAreExplained(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(chartDir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var defaults map[string]any
	if err := yaml.UnmarshalStrict(data, &defaults); err != nil {
		t.Fatal(err)
	}
	var table strings.Builder
	table.WriteString("| value | default | what it is for |\n|---|---|---|\n")
	values := explained(string(data))
	for _, v := range values {
		at, err := json.Marshal(lookUp(t, defaults, v.name))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&table, "| `%s` | `%s` | %s |\n", v.name, at, strings.ReplaceAll(v.text, "|", `\|`))
	}
	for name := range leaves(defaults, "") {
		found := false
		for _, v := range values {
			found = found || name == v.name || strings.HasPrefix(name, v.name+".")
		}
		if !found {
			t.Errorf("values.yaml does not explain %s by a comment that begins with --", name)
		}
	}
	docs.CompareSection(t, filepath.Join(deployments, "../docs/install.md"), "values", table.String(), *update)
}

func lookUp(t *testing.T, in map[string]any, name string) any {
	t.Helper()
	first, rest, deeper := strings.Cut(name, ".")
	value, there := in[first]
	if !there {
		t.Fatalf("there is no value %s", name)
	}
	if below, is := value.(map[string]any); deeper && is {
		return lookUp(t, below, rest)
	}
	return value
}

// leaves returns the names of all values that have none below.
func leaves(in map[string]any, prefix string) map[string]bool {
	all := make(map[string]bool)
	for name, value := range in {
		if below, is := value.(map[string]any); is && len(below) > 0 {
			for name := range leaves(below, prefix+name+".") {
				all[name] = true
			}
			continue
		}
		all[prefix+name] = true
	}
	return all
}
