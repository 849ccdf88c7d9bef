package report

import (
	"fmt"
	"strings"
)

// CountNoun returns a count and a noun: "1 device", "3 devices".
func CountNoun(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	if stem, y := strings.CutSuffix(noun, "y"); y {
		return fmt.Sprintf("%d %sies", n, stem)
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// JoinNames joins names: "a", "a and b", "a, b and 3 more".
func JoinNames(names []string) string {
	switch n := len(names); {
	case n == 0:
		return "none"
	case n <= 2:
		return strings.Join(names, " and ")
	case n == 3:
		return names[0] + ", " + names[1] + " and " + names[2]
	default:
		return fmt.Sprintf("%s, %s and %d more", names[0], names[1], n-2)
	}
}
