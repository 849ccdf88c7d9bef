package codes

import (
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/internal/terminal"
)

// All conditions of devices have a code.
func TestCodeOf(t *testing.T) {
	for _, condition := range discovery.Conditions() {
		if _, known := Lookup(CodeOf(condition)); !known {
			t.Errorf("%s has the code %q", condition, CodeOf(condition))
		}
	}
	if CodeOf("") != "" {
		t.Error("a device that is well has a code")
	}
}

// The likeliest causes of a symptom are codes with that symptom.
func TestLikeliestHaveTheSymptom(t *testing.T) {
	for symptom, ids := range likeliest {
		for _, id := range ids {
			if c, known := Lookup(id); !known || !slices.Contains(c.Symptoms, symptom) {
				t.Errorf("%s has not the symptom %q", id, symptom)
			}
		}
		if len(ids) > firstCauses {
			t.Errorf("%q: %d causes are more than are described", symptom, len(ids))
		}
	}
}

// The rest of a command has no prompt, so that users can paste the whole command.
func TestExplanationOfALongCommand(t *testing.T) {
	for _, c := range Codes() {
		var b strings.Builder
		if err := c.WriteExplanation(&b, terminal.Style{Width: 60}); err != nil {
			t.Fatal(err)
		}
		if got := strings.Count(b.String(), "\n  $ "); got != len(c.Fixes) {
			t.Errorf("%s: %d prompts of %d commands:\n%s", c.ID, got, len(c.Fixes), &b)
		}
	}
}
