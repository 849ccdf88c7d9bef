package main

import (
	"math"
	"strings"
	"testing"
	"time"
)

func TestLawOf(t *testing.T) {
	requests := func(r *result) float64 { return float64(r.requests) }
	for name, test := range map[string]struct {
		results  []result
		exponent float64
		at       float64
	}{
		"linear":    {[]result{{nodes: 100, requests: 700}, {nodes: 300, requests: 2100}, {nodes: 1000, requests: 7000}}, 1, 35000},
		"constant":  {[]result{{nodes: 100, requests: 40}, {nodes: 300, requests: 40}}, 0, 40},
		"quadratic": {[]result{{nodes: 10, requests: 100}, {nodes: 100, requests: 10000}}, 2, 25e6},
	} {
		l, found := lawOf(test.results, requests)
		if !found || math.Abs(l.exponent-test.exponent) > 1e-9 || math.Abs(l.at/test.at-1) > 1e-9 {
			t.Errorf("%s: %+v, %t", name, l, found)
		}
	}
	for name, results := range map[string][]result{
		"one size": {{nodes: 100, requests: 700}, {nodes: 100, requests: 800}},
		"zero":     {{nodes: 100}, {nodes: 300, requests: 5}},
	} {
		if l, found := lawOf(results, requests); found {
			t.Errorf("%s: %+v", name, l)
		}
	}
}

func TestRows(t *testing.T) {
	results := []result{
		{situation: "start", nodes: 100, requests: 700, bytes: 3e6, took: 1500 * time.Millisecond}, {situation: "rest", nodes: 100},
		{situation: "start", nodes: 300, requests: 2100, bytes: 9e6}, {situation: "rest", nodes: 300},
	}
	var lines []string
	for _, row := range append(resultRows(results), lawRows(results)...) {
		lines = append(lines, strings.Join(row, "|"))
	}
	want := `start|100|1.5|7.0|30.0|0|0, 0|0|0.0|0.0|0, 0
start|300|0.0|7.0|30.0|0|0, 0|0|0.0|0.0|0, 0
rest|100|0.0|0.0|0.0|0|0, 0|0|0.0|0.0|0, 0
rest|300|0.0|0.0|0.0|0|0, 0|0|0.0|0.0|0, 0
start|1.00: 35000|1.00: 150 MB|
rest|||`
	if got := strings.Join(lines, "\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestRounded(t *testing.T) {
	for value, want := range map[float64]string{0: "0", 35123: "35000", 1.25: "1.3", 0.0123: "0.012", 99.7: "100"} {
		if got := rounded(value); got != want {
			t.Errorf("%v: %s, want %s", value, got, want)
		}
	}
}
