// Package doctor judges the state of a node. It checks gathered facts for known faults, and
// reports the code, the cause and the repair commands of each fault found. It gathers no
// facts, calls no service and changes nothing; see package gather.
package doctor

import (
	"fmt"
	"slices"
	"strings"
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

// categories lists all categories with the first digits of their codes, and with additional
// names accepted by ParseCategories.
var categories = []struct {
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
		for _, c := range categories {
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

// Finding is one result of a check. Text states the result in one line. A fault also has a
// code, the cause as reported by the host or the cluster, and the commands that repair it.
type Finding struct {
	Result Result
	Text   string
	Code   string
	Cause  string
	Fix    []string // commands; a remark after # may describe what the command disturbs

	// Follows is the code of the finding that caused this finding, or "" for an independent
	// finding.
	Follows string
}

// Section holds the findings of a category.
type Section struct {
	Category Category
	Findings []Finding
}

// Report holds the findings of all checks on a node.
type Report struct {
	Head     Head
	Sections []Section
}

// Count returns the number of findings with a result. A category that could not be checked at
// all counts once.
func (r *Report) Count(result Result) (n int) {
	for _, s := range r.Sections {
		for _, f := range s.Findings {
			if f.Result == result {
				n++
			}
		}
	}
	return n
}

// firstFinding returns the first finding with a result, preferring findings without a Follows code.
func (r *Report) firstFinding(result Result) (first Finding, found bool) {
	for _, s := range r.Sections {
		for _, f := range s.Findings {
			if f.Result == result && (!found || first.Follows != "" && f.Follows == "") {
				first, found = f, true
			}
		}
	}
	return first, found
}

// IsHealthy reports whether no check failed. If strict is set, warnings count as failures.
func (r *Report) IsHealthy(strict bool) bool {
	return r.Count(Failed) == 0 && (!strict || r.Count(Warning) == 0)
}

// Codes returns the sorted codes of all findings, without duplicates.
func (r *Report) Codes() (found []string) {
	for _, s := range r.Sections {
		for _, f := range s.Findings {
			if f.Code != "" && !slices.Contains(found, f.Code) {
				found = append(found, f.Code)
			}
		}
	}
	slices.Sort(found)
	return found
}

// check is one check of the facts. look adds at least one finding for each thing checked, even
// if only to report that the facts are missing.
type check struct {
	category Category
	codes    []string // the codes that the check may report
	look     func(f *Facts, say *findingList)
}

// allChecks returns all checks, in the order of the report.
func allChecks() []check {
	return slices.Concat(kubeletChecks, runtimeChecks, deviceChecks, hostChecks, apiChecks, clusterChecks, agentChecks)
}

// JudgeFacts runs the checks of the given categories, or all checks by default.
func JudgeFacts(f *Facts, only ...Category) *Report {
	r := &Report{Head: f.Head}
	stated := make(map[string]bool) // reasons why categories cannot be checked
	for _, c := range categories {
		if len(only) > 0 && !slices.Contains(only, c.Category) {
			continue
		}
		say := &findingList{}
		if why, mention := f.uncheckedReason(c.Category); why != "" {
			if mention && !stated[why] {
				say.not("%s", why)
			}
			stated[why] = true
		} else {
			for _, check := range allChecks() {
				if check.category == c.Category {
					check.look(f, say)
				}
			}
		}
		if len(say.findings) > 0 {
			r.Sections = append(r.Sections, Section{c.Category, say.findings})
		}
	}
	return r
}

// findingList collects the findings of the checks.
type findingList struct{ findings []Finding }

func (s *findingList) addOK(format string, args ...any) {
	s.findings = append(s.findings, Finding{Result: OK, Text: fmt.Sprintf(format, args...)})
}

// not adds a finding that something was not checked, with the reason.
func (s *findingList) not(format string, args ...any) {
	s.findings = append(s.findings, Finding{Result: NotQueried, Text: fmt.Sprintf(format, args...)})
}

// addFault adds a fault.
func (s *findingList) addFault(code, text, cause string, fix ...string) {
	result := Failed
	if c, known := Lookup(code); known {
		result = c.Result
	}
	for i := range fix {
		fix[i] = withDisturbance(fix[i])
	}
	s.findings = append(s.findings, Finding{Result: result, Text: text, Code: code, Cause: cause, Fix: fix})
}

// setFollows sets the Follows code of the last finding.
func (s *findingList) setFollows(code string) { s.findings[len(s.findings)-1].Follows = code }

// noneSince reports whether no fault was added after the first since findings.
func (s *findingList) noneSince(since int) bool {
	return !slices.ContainsFunc(s.findings[since:], func(f Finding) bool { return f.Code != "" })
}
