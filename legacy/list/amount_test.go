package list

import (
	"slices"
	"testing"

	"chandler.dev/legacy/list/listtest"
)

func TestPreferAmounts(t *testing.T) {
	l := first(listtest.MemoryResource, listtest.InUnits("a", 8), listtest.InUnits("b", 8))
	for name, test := range map[string]struct {
		available, include []string
		size               int
		want               []string
	}{
		"the fullest that has enough": {slices.Concat(listtest.UnitIDs("a", 0, 8), listtest.UnitIDs("b", 5, 8)), nil, 3, listtest.UnitIDs("b", 5, 8)},
		"not the one with too little": {slices.Concat(listtest.UnitIDs("a", 0, 8), listtest.UnitIDs("b", 5, 8)), nil, 4, listtest.UnitIDs("a", 0, 4)},
		"beside what is included":     {slices.Concat(listtest.UnitIDs("a", 0, 8), listtest.UnitIDs("b", 5, 8)), listtest.UnitIDs("a", 7, 8), 2, []string{"a-_-0", "a-_-7"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := l.PreferIDs(test.available, test.include, test.size)
			if err != nil || !slices.Equal(got, test.want) {
				t.Errorf("got %v, %v; want %v", got, err, test.want)
			}
		})
	}
	if got, err := l.PreferIDs(slices.Concat(listtest.UnitIDs("a", 0, 2), listtest.UnitIDs("b", 0, 2)), nil, 3); err != nil || len(got) != 3 {
		t.Errorf("where none has enough: %v, %v; Allocate is to say so", got, err)
	}
}

func TestAll(t *testing.T) {
	l := first(listtest.Resource, listtest.GPU("a"), listtest.GPU("b"))
	a, b := l.Unit("a"), l.Unit("b")
	if l.All([]*Unit{a}) || !l.All([]*Unit{a, b}) {
		t.Errorf("one of two is all: %v, and two: %v", l.All([]*Unit{a}), l.All([]*Unit{a, b}))
	}
}
