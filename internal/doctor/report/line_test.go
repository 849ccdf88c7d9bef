package report

import (
	"strings"
	"testing"
	"unicode/utf8"

	"chandler.dev/internal/doctor/codes"
)

// A line contains the first fault and the number of further faults, within the length limit.
func TestLine(t *testing.T) {
	long := strings.Repeat("größer ", 30)
	for name, test := range map[string]struct {
		findings []Finding
		strict   bool
		want     string
	}{
		"well":               {[]Finding{{Result: codes.OK, Text: "8 devices"}}, false, "no faults found"},
		"a warning":          {[]Finding{{Result: codes.Warning, Text: "slow", Code: "CH0001"}}, false, "no faults found"},
		"a warning, strict":  {[]Finding{{Result: codes.Warning, Text: "slow", Code: "CH0001"}}, true, "CH0001: slow"},
		"a fault":            {[]Finding{{Result: codes.Warning, Text: "slow"}, {Result: codes.Failed, Text: "gone\nnow", Code: "CH0002"}}, true, "CH0002: gone now"},
		"faults":             {[]Finding{{Result: codes.Failed, Text: "a", Code: "CH0002"}, {Result: codes.Failed, Text: "b"}}, false, "CH0002: a (and 1 more)"},
		"long":               {[]Finding{{Result: codes.Failed, Text: long}}, false, "größer"},
		"long, one of three": {[]Finding{{Result: codes.Failed, Text: long}, {Result: codes.Failed}, {Result: codes.Failed}}, false, "größer"},
	} {
		t.Run(name, func(t *testing.T) {
			line := (&Report{Sections: []Section{{codes.Devices, test.findings}}}).Line(test.strict)
			if len(line) > LineLimit || !utf8.ValidString(line) || strings.Contains(line, "\n") {
				t.Errorf("%d bytes: %q", len(line), line)
			}
			if strings.HasPrefix(name, "long") {
				if !strings.HasPrefix(line, test.want) || !strings.Contains(line, "...") || len(test.findings) > 1 && !strings.HasSuffix(line, "... (and 2 more)") {
					t.Errorf("%q", line)
				}
			} else if line != test.want {
				t.Errorf("%q, want %q", line, test.want)
			}
		})
	}
}
