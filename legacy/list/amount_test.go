package list

import (
	"slices"
	"testing"
)

func TestPreferAmounts(t *testing.T) {
	l := first(memoryResource, inUnits("a", 8), inUnits("b", 8))
	for name, test := range map[string]struct {
		available, include []string
		size               int
		want               []string
	}{
		"the fullest that has enough": {slices.Concat(units("a", 0, 8), units("b", 5, 8)), nil, 3, units("b", 5, 8)},
		"not the one with too little": {slices.Concat(units("a", 0, 8), units("b", 5, 8)), nil, 4, units("a", 0, 4)},
		"beside what is included":     {slices.Concat(units("a", 0, 8), units("b", 5, 8)), units("a", 7, 8), 2, []string{"a-_-0", "a-_-7"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := l.Prefer(test.available, test.include, test.size)
			if err != nil || !slices.Equal(got, test.want) {
				t.Errorf("got %v, %v; want %v", got, err, test.want)
			}
		})
	}
	if got, err := l.Prefer(slices.Concat(units("a", 0, 2), units("b", 0, 2)), nil, 3); err != nil || len(got) != 3 {
		t.Errorf("where none has enough: %v, %v; Allocate is to say so", got, err)
	}
}
