package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

// A result is what a situation of a fleet costs.
type result struct {
	situation string
	nodes     int
	took      time.Duration // until the situation was over
	requests  int
	byName    map[string]int // requests
	bodies    map[string]int // bytes, by the same names
	perSecond int            // most requests within a second
	refused   int
	failed    int
	bytes     int
	watches   int           // open at the end
	server    time.Duration // processor time of the API server, without the time of a cluster without agents
	etcd      time.Duration // the same for etcd
	serverMB  int           // resident memory at the end
	etcdMB    int
}

// largeFleet is the number of nodes to which the results are extrapolated.
const largeFleet = 5000

// A law is how a quantity grows with the number of nodes: with their power.
type law struct {
	exponent float64
	at       float64 // the quantity of the large fleet
}

// lawOf fits a power law to a quantity at different numbers of nodes, by least squares of the
// logarithms. It reports false if the quantity is 0 or was measured with one number of nodes.
func lawOf(results []result, quantity func(*result) float64) (l law, found bool) {
	var n, sumX, sumY, sumXX, sumXY float64
	for i := range results {
		value := quantity(&results[i])
		if value <= 0 {
			return law{}, false
		}
		x, y := math.Log(float64(results[i].nodes)), math.Log(value)
		n, sumX, sumY, sumXX, sumXY = n+1, sumX+x, sumY+y, sumXX+x*x, sumXY+x*y
	}
	spread := n*sumXX - sumX*sumX
	if n < 2 || spread == 0 {
		return law{}, false
	}
	l.exponent = (n*sumXY - sumX*sumY) / spread
	l.at = math.Exp((sumY-l.exponent*sumX)/n + l.exponent*math.Log(largeFleet))
	return l, true
}

// quantities are the columns of the table of laws.
var quantities = []struct {
	name   string
	of     func(*result) float64
	format func(float64) string
}{
	{"requests", func(r *result) float64 { return float64(r.requests) }, rounded},
	{"bytes", func(r *result) float64 { return float64(r.bytes) }, func(v float64) string { return rounded(v/1e6) + " MB" }},
	{"server's processor time", func(r *result) float64 { return r.server.Seconds() }, func(v float64) string { return rounded(v) + " s" }},
}

// lawRows returns the table of laws, a row for each situation.
func lawRows(results []result) (rows [][]string) {
	of := make(map[string][]result)
	var situations []string
	for _, r := range results {
		if of[r.situation] == nil {
			situations = append(situations, r.situation)
		}
		of[r.situation] = append(of[r.situation], r)
	}
	for _, situation := range situations {
		row := []string{situation}
		for _, q := range quantities {
			if l, found := lawOf(of[situation], q.of); found {
				row = append(row, fmt.Sprintf("%.2f: %s", l.exponent, q.format(l.at)))
			} else {
				row = append(row, "")
			}
		}
		rows = append(rows, row)
	}
	return rows
}

// resultRows returns the table of results, sorted by situation in the order of measurement.
func resultRows(results []result) (rows [][]string) {
	order := make(map[string]int)
	for _, r := range results {
		if _, known := order[r.situation]; !known {
			order[r.situation] = len(order)
		}
	}
	sorted := slices.Clone(results)
	slices.SortStableFunc(sorted, func(a, b result) int { return cmp.Compare(order[a.situation], order[b.situation]) })
	for _, r := range sorted {
		each := func(v float64) string { return strconv.FormatFloat(v/float64(r.nodes), 'f', 1, 64) }
		rows = append(rows, []string{
			r.situation, strconv.Itoa(r.nodes), seconds(r.took), each(float64(r.requests)), each(float64(r.bytes) / 1e3), strconv.Itoa(r.perSecond),
			fmt.Sprintf("%d, %d", r.refused, r.failed), strconv.Itoa(r.watches), seconds(r.server), seconds(r.etcd), fmt.Sprintf("%d, %d", r.serverMB, r.etcdMB),
		})
	}
	return rows
}

var resultColumns = []string{
	"situation", "nodes", "took, s", "requests per node", "KB per node", "most requests in a second", "refused, failed", "watches", "server's processor time, s",
	"etcd's, s", "memory of both, MB",
}

func seconds(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', 1, 64) }

// rounded returns a number with two significant digits.
func rounded(v float64) string {
	if v == 0 {
		return "0"
	}
	unit := math.Pow(10, math.Floor(math.Log10(math.Abs(v)))-1)
	return strconv.FormatFloat(math.Round(v/unit)*unit, 'f', max(0, int(-math.Log10(unit)+0.5)), 64)
}
