package pattern_test

import (
	"testing"

	"chandler.dev/internal/pattern"
)

func TestLazy(t *testing.T) {
	invalid := pattern.Lazy(`(`) // is not compiled here
	word := pattern.Lazy(`^[a-z]{1,3}$`)
	for text, want := range map[string]bool{"abc": true, "abcd": false} {
		if got := word().MatchString(text); got != want {
			t.Errorf("%s: %v", text, got)
		}
	}
	if first, second := word(), word(); first != second {
		t.Error("the expression was compiled twice")
	}
	defer func() {
		if recover() == nil {
			t.Error("an invalid expression was compiled")
		}
	}()
	invalid()
}
