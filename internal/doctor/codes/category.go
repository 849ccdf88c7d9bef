package codes

import (
	"fmt"
	"slices"
	"strings"

	"chandler.dev/internal/terminal"
)

// Category is the subject of a check.
type Category string

// The categories, in the order of the report.
const (
	Kubelet Category = "kubelet"
	Runtime Category = "container runtime"
	Devices Category = "devices"
	Host    Category = "host"
	APIs    Category = "two APIs"
	Cluster Category = "cluster"
	Agent   Category = "agent"
)

// allCategories lists all categories with the first digits of their codes, and with additional
// names accepted by ParseCategories.
var allCategories = []struct {
	Category
	digits  string
	aliases []string
}{
	{Kubelet, "01", nil},
	{Runtime, "02", []string{"runtime", "container-runtime"}},
	{Devices, "03", nil},
	{Host, "04", nil},
	{APIs, "05", []string{"apis", "two-apis"}},
	{Cluster, "06", nil},
	{Agent, "07", nil},
}

// ParseCategories parses a comma-separated list of categories. It returns nil for an empty
// list, which stands for all categories.
func ParseCategories(list string) (chosen []Category, err error) {
	for name := range strings.SplitSeq(list, ",") {
		if name = strings.TrimSpace(name); name == "" {
			continue
		}
		found := false
		for _, c := range allCategories {
			if name == string(c.Category) || slices.Contains(c.aliases, name) {
				chosen, found = append(chosen, c.Category), true
			}
		}
		if !found {
			return nil, fmt.Errorf("category %q: want some of kubelet, runtime, devices, host, apis, cluster, agent", name)
		}
	}
	return chosen, nil
}

// Result is the outcome of a check.
type Result int

// The results, in increasing order of severity.
const (
	NotQueried Result = iota // the check does not apply, or its facts are missing
	OK
	Warning // a fault that does not stop existing devices from working
	Failed
)

// AllCategories returns all categories, in the order of the report.
func AllCategories() (all []Category) {
	for _, c := range allCategories {
		all = append(all, c.Category)
	}
	return all
}

var resultGlyphs = [...]terminal.Glyph{NotQueried: terminal.NotQueried, OK: terminal.OK, Warning: terminal.Warned, Failed: terminal.Failed}

// Glyph returns the symbol of a result in a terminal.
func (r Result) Glyph() terminal.Glyph { return resultGlyphs[r] }
