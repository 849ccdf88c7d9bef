package neuron

import (
	"slices"
	"testing"
)

func TestParseConnected(t *testing.T) {
	for text, want := range map[string][]uint64{
		"12, 3, 4, 1": {1, 3, 4, 12}, "0": {0}, "1,2": {1, 2},
		"": nil, "1, ": nil, "-1": nil, "1, three": nil, "1, 2, 3, 4, 5": nil, "256": nil,
	} {
		if got, err := parseConnected(text); !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%q: got %v and the error %v; want %v", text, got, err, want)
		}
	}
}

func FuzzParseConnected(f *testing.F) {
	f.Add("12, 3, 4, 1")
	f.Add("-1, ")
	f.Fuzz(func(t *testing.T, text string) {
		numbers, err := parseConnected(text)
		if (err == nil) != (len(numbers) > 0) || len(numbers) > 4 || !slices.IsSorted(numbers) {
			t.Errorf("%q: %v and the error %v", text, numbers, err)
		}
	})
}
