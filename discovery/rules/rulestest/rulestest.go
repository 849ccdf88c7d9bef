// Package rulestest provides helpers for tests of rules.
package rulestest

import (
	"testing"

	"chandler.dev/discovery/rules"
)

// CompileSelector compiles a CEL expression, and fails the test if the expression is invalid.
func CompileSelector(t testing.TB, expression string) rules.Selector {
	t.Helper()
	compiled, err := rules.Compile(expression)
	if err != nil {
		t.Fatal(err)
	}
	return compiled
}
