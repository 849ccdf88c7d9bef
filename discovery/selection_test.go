package discovery

import (
	"errors"
	"testing"
)

func TestFirstSelectedWins(t *testing.T) {
	failed := errors.New("no such key")
	selection := func(value string, selected bool, err error) Selection[string] {
		return Selection[string]{Expression: value, Value: value, Selects: func(Device) (bool, error) { return selected, err }}
	}
	no, fails, first, second := selection("no", false, nil), selection("fails", false, failed), selection("first", true, nil), selection("second", true, nil)
	for name, test := range map[string]struct {
		selections []Selection[string]
		want       string
		err        error
	}{
		"none":                           {nil, "", nil},
		"no match":                       {[]Selection[string]{no}, "", nil},
		"first match":                    {[]Selection[string]{no, first, second}, "first", nil},
		"error before a match":           {[]Selection[string]{fails, second}, "second", nil},
		"error without a match":          {[]Selection[string]{no, fails}, "", failed},
		"an error does not select":       {[]Selection[string]{selection("error", true, failed)}, "", failed},
		"an error after a match is late": {[]Selection[string]{first, fails}, "first", nil},
	} {
		got, err := FirstSelected(test.selections, Device{})
		if !errors.Is(err, test.err) || (got == nil) != (test.want == "") || got != nil && *got != test.want {
			t.Errorf("%s: got %v, %v; want %q, %v", name, got, err, test.want, test.err)
		}
	}
}

func TestEqualSelections(t *testing.T) {
	a := []Selection[int]{{Expression: "x", Value: 1}, {Expression: "y"}}
	for name, test := range map[string]struct {
		b    []Selection[int]
		want bool
	}{
		"same, with another function": {[]Selection[int]{{Expression: "x", Value: 1, Selects: func(Device) (bool, error) { return true, nil }}, {Expression: "y"}}, true},
		"another value":               {[]Selection[int]{{Expression: "x", Value: 2}, {Expression: "y"}}, false},
		"another expression":          {[]Selection[int]{{Expression: "z", Value: 1}, {Expression: "y"}}, false},
		"another order":               {[]Selection[int]{{Expression: "y"}, {Expression: "x", Value: 1}}, false},
		"fewer":                       {[]Selection[int]{{Expression: "x", Value: 1}}, false},
	} {
		if got := EqualSelections(a, test.b); got != test.want {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}
