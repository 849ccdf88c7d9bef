package report

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/terminal"
)

// LineLimit is the default maximum length, in bytes, of a message in node-problem-detector
// (max_output_length in pkg/custompluginmonitor/types/config.go, read in 1.34).
const LineLimit = 80

// Line summarizes the report in one line of at most [LineLimit] bytes: the first failure, and
// the number of further failures. If strict is set and there is no failure, Line uses the
// warnings.
func (r *Report) Line(strict bool) string {
	worst := codes.Failed
	if strict && r.Count(codes.Failed) == 0 {
		worst = codes.Warning
	}
	f, found := r.firstFinding(worst)
	if !found {
		return "no faults found"
	}
	text := f.Text
	if f.Code != "" {
		text = f.Code + ": " + text
	}
	if more := r.Count(worst) - 1; more > 0 {
		end := fmt.Sprintf(" (and %d more)", more)
		return Cut(text, LineLimit-len(end)) + end
	}
	return Cut(text, LineLimit)
}

// Cut returns a text as one line of at most limit bytes.
func Cut(text string, limit int) string {
	text = terminal.SafeText(strings.Join(strings.Fields(text), " "))
	if len(text) <= limit {
		return text
	}
	const dots = "..."
	text = text[:limit-len(dots)]
	for !utf8.ValidString(text) {
		text = text[:len(text)-1]
	}
	return strings.TrimRight(text, " ") + dots
}
