package natural

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCompareNames(t *testing.T) {
	want := []string{"", "0", "1", "a", "a01", "a1", "a1b", "a2", "a10", "a10b2", "a10b10", "b"}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, CompareNames)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
