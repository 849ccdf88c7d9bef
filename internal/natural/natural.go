// Package natural defines the order of names with numbers, such as names of devices.
package natural

import (
	"cmp"
	"strings"
)

// CompareNames compares names with numbers by value: "gpu9" comes before "gpu10".
func CompareNames(a, b string) int {
	x, y := a, b
	for x != "" && y != "" {
		m, n := digits(x), digits(y)
		if m == 0 || n == 0 {
			if x[0] != y[0] {
				return cmp.Compare(x[0], y[0])
			}
			x, y = x[1:], y[1:]
			continue
		}
		number, other := strings.TrimLeft(x[:m], "0"), strings.TrimLeft(y[:n], "0")
		if order := cmp.Or(cmp.Compare(len(number), len(other)), strings.Compare(number, other)); order != 0 {
			return order
		}
		x, y = x[m:], y[n:]
	}
	return cmp.Or(cmp.Compare(len(x), len(y)), strings.Compare(a, b))
}

// digits returns the number of decimal digits at the beginning of s.
func digits(s string) int {
	n := 0
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
}
