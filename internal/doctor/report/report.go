// Package report has the findings of doctor about a node, and prints them for people, for programs,
// and in one line. It checks nothing; see package doctor.
package report

import (
	"slices"
	"time"

	"chandler.dev/internal/doctor/codes"
)

// Head describes the subject of a report.
type Head struct {
	Node       string
	Kubernetes string // the version of the kubelet, or else of the API server; "" without Kubernetes
	Version    string // the version of this program
	Time       time.Time
	Source     string // the source of the facts instead of a node: [Recording] or [Copy], which have no services
	HostRoot   string // the directory of a [Copy]
}

// The sources of facts other than a node.
const (
	Recording = "host recording"
	Copy      = "copy of a host"
)

// Finding is one result of a check. Text states the result in one line. A fault also has a
// code, the cause as reported by the host or the cluster, and the commands that repair it.
type Finding struct {
	Result codes.Result
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
	Category codes.Category
	Findings []Finding
}

// Report holds the findings of all checks on a node.
type Report struct {
	Head     Head
	Sections []Section
}

// Count returns the number of findings with a result. A category that could not be checked at
// all counts once.
func (r *Report) Count(result codes.Result) (n int) {
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
func (r *Report) firstFinding(result codes.Result) (first Finding, found bool) {
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
	return r.Count(codes.Failed) == 0 && (!strict || r.Count(codes.Warning) == 0)
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
