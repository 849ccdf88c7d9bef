// Package doctor judges the state of a node. It checks gathered facts for known faults, and
// reports the code, the cause and the repair commands of each fault found. It gathers no
// facts, calls no service and changes nothing; see package gather.
package doctor

import (
	"slices"

	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

// check is one check of the facts. look adds at least one finding for each thing checked, even
// if only to report that the facts are missing.
type check struct {
	category codes.Category
	codes    []string // the codes that the check may report
	look     func(f *Facts, say *report.List)
}

// allChecks returns all checks, in the order of the report.
func allChecks() []check {
	return slices.Concat(kubeletChecks, runtimeChecks, deviceChecks, hostChecks, apiChecks, clusterChecks, agentChecks)
}

// JudgeFacts runs the checks of the given categories, or all checks by default.
func JudgeFacts(f *Facts, only ...codes.Category) *report.Report {
	r := &report.Report{Head: f.Head}
	stated := make(map[string]bool) // reasons why categories cannot be checked
	for _, c := range codes.AllCategories() {
		if len(only) > 0 && !slices.Contains(only, c) {
			continue
		}
		say := &report.List{}
		if why, mention := f.uncheckedReason(c); why != "" {
			if mention && !stated[why] {
				say.AddSkipped("%s", why)
			}
			stated[why] = true
		} else {
			for _, check := range allChecks() {
				if check.category == c {
					check.look(f, say)
				}
			}
		}
		if len(say.Findings) > 0 {
			r.Sections = append(r.Sections, report.Section{Category: c, Findings: say.Findings})
		}
	}
	return r
}
