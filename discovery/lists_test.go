package discovery_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
)

// The list contains names that are too long for a string.
func TestSetNames(t *testing.T) {
	long := []string{strings.Repeat("a", 40), strings.Repeat("b", 40)}
	tests := map[string]struct {
		names []string
		text  *string
		list  []string
	}{
		"none":     {},
		"one":      {names: []string{"a"}, text: new("a")},
		"two":      {names: []string{"a", "b"}, text: new("a,b"), list: []string{"a", "b"}},
		"too long": {names: long, list: long},
		"one is":   {names: []string{"a", strings.Repeat("b", 65)}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			d := discovery.Device{Name: "d", Attributes: discovery.Attributes{}}
			d.SetNames("linkedTo", test.names)
			if diff := cmp.Diff(test.text, d.Attributes["linkedTo"].StringValue); diff != "" {
				t.Errorf("string (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.list, d.Lists["linkedTo"].StringValues); diff != "" {
				t.Errorf("list (-want +got):\n%s", diff)
			}
			want := test.names
			if test.text == nil && test.list == nil {
				want = nil
			}
			if diff := cmp.Diff(want, d.Names("linkedTo")); diff != "" {
				t.Errorf("names (-want +got):\n%s", diff)
			}
		})
	}
}
