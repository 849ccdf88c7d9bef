package report

import (
	"fmt"
	"slices"

	"chandler.dev/internal/doctor/codes"
)

// List collects the findings of checks.
type List struct{ Findings []Finding }

// AddOK adds a finding that something is as it should be.
func (s *List) AddOK(format string, args ...any) {
	s.Findings = append(s.Findings, Finding{Result: codes.OK, Text: fmt.Sprintf(format, args...)})
}

// AddSkipped adds a finding that something was not checked, with the reason.
func (s *List) AddSkipped(format string, args ...any) {
	s.Findings = append(s.Findings, Finding{Result: codes.NotQueried, Text: fmt.Sprintf(format, args...)})
}

// AddFault adds a fault.
func (s *List) AddFault(code, text, cause string, fix ...string) {
	result := codes.Failed
	if c, known := codes.Lookup(code); known {
		result = c.Result
	}
	for i := range fix {
		fix[i] = codes.WithDisturbance(fix[i])
	}
	s.Findings = append(s.Findings, Finding{Result: result, Text: text, Code: code, Cause: cause, Fix: fix})
}

// SetFollows sets the Follows code of the last finding.
func (s *List) SetFollows(code string) { s.Findings[len(s.Findings)-1].Follows = code }

// NoFaultSince reports whether no fault was added after the first since findings.
func (s *List) NoFaultSince(since int) bool {
	return !slices.ContainsFunc(s.Findings[since:], func(f Finding) bool { return f.Code != "" })
}
