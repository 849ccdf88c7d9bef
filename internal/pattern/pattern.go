// Package pattern compiles regular expressions at their first use. The agent contains the
// expressions of all families and of the whole configuration, and a node needs few of them.
package pattern

import (
	"regexp"
	"sync"
)

// Lazy returns a function that compiles the expression at its first call. The function panics if
// the expression is invalid, and may be called concurrently.
func Lazy(expression string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expression) })
}
