package list

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

func TestPrefer(t *testing.T) {
	// Two nodes of four devices, each with two PCIe roots; 2 and 6 have a
	// private link.
	var pairs []rules.Offered
	for i := range 8 {
		fabric := ""
		if i == 2 || i == 6 {
			fabric = "hive"
		}
		pairs = append(pairs, at(gpu(fmt.Sprint(i)), int64(i/4), fmt.Sprint("pci", i/2), fabric))
	}
	var shares []rules.Offered
	for i := range 3 {
		d := at(gpu(fmt.Sprint(i)), int64(i/2), "", "")
		shares = append(shares, offer(d, "", fmt.Sprintf("%d::0", i), fmt.Sprintf("%d::1", i), fmt.Sprintf("%d::2", i)))
	}
	// A ring of six in one fabric, and two pieces of silicon of two and three
	// parts, all on one NUMA node.
	var ring, parts []rules.Offered
	for i := range 6 {
		d := at(gpu(fmt.Sprint(i)), 0, "", "ring")
		// With a third that is not there, they are too many for a string.
		d.SetNames("linkedTo", []string{fmt.Sprintf("gpu-%d", (i+1)%6), fmt.Sprintf("gpu-%d", (i+5)%6), strings.Repeat("x", 60)})
		ring = append(ring, d)
	}
	for i := range 5 {
		d := at(gpu(fmt.Sprint(i)), 0, "", "")
		d.PartOf = &discovery.Silicon{Name: fmt.Sprint("card-", i/3)}
		parts = append(parts, d)
	}
	tests := map[string]struct {
		devices            []rules.Offered
		available, include string
		size               int
		want               string
	}{
		"none":                           {pairs, "0 1", "", 0, ""},
		"private link first":             {pairs, "0 1 2 3 4 5 6 7", "", 2, "2 6"},
		"then the PCIe root":             {pairs, "0 2 3 5", "", 2, "2 3"},
		"then the NUMA node":             {pairs, "0 5 7", "", 2, "5 7"},
		"a whole node":                   {pairs, "0 1 3 4 5 6 7", "", 4, "4 5 6 7"},
		"the smaller neighbourhood":      {pairs, "0 1 3 4 5", "", 2, "4 5"},
		"one that keeps neighbours":      {pairs, "0 1 3 5", "", 1, "5"},
		"near to what must be included":  {pairs, "0 1 3 4 5", "5", 2, "4 5"},
		"all that must be included":      {pairs, "0 1 2 3", "3 0", 2, "0 3"},
		"included and not available":     {pairs, "0 1", "7", 2, "0 7"},
		"all":                            {pairs, "5 0 3", "", 3, "0 3 5"},
		"IDs that are listed no more":    {pairs, "x y", "", 1, "x"},
		"beside a stranger":              {pairs, "0 1 3 5", "x", 2, "5 x"},
		"too many":                       {pairs, "0 1", "", 3, "preferred allocation of 3 devices: 2 are available, 0 must be included"},
		"fewer than must be included":    {pairs, "0 1", "0 1", 1, "preferred allocation of 1 devices: 2 are available, 2 must be included"},
		"share of the freest":            {shares, "0::0 1::1 1::2 2::0", "", 1, "1::1"},
		"shares of near ones":            {shares, "0::0 0::1 0::2 1::0 1::1 1::2 2::0 2::1 2::2", "", 2, "0::0 1::0"},
		"shares of all":                  {shares, "0::0 0::1 0::2 1::0 1::1 1::2 2::0 2::1 2::2", "", 3, "0::0 1::0 2::0"},
		"shares beside those included":   {shares, "0::0 0::1 1::0 1::1", "0::0", 2, "0::0 1::0"},
		"linked to each other":           {ring, "0 2 4 5", "", 2, "0 5"},
		"a stretch of the ring":          {ring, "0 1 3 4 5", "3", 3, "3 4 5"},
		"parts of one":                   {parts, "0 1 3 4", "0", 2, "0 1"},
		"parts of the emptier one":       {parts, "0 1 2 3 4", "", 2, "3 4"},
		"parts of the one that has all":  {parts, "0 1 2 3 4", "", 3, "0 1 2"},
		"shares of one, if there is one": {shares, "2::0 2::1 2::2", "", 2, "2::0 2::1"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			l := first(gpuResource, test.devices...)
			available := strings.Fields(test.available)
			for range 20 {
				rand.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
				ids, err := l.Prefer(available, strings.Fields(test.include), test.size)
				got := strings.Join(ids, " ")
				if err != nil {
					got = err.Error()
				}
				if got != test.want {
					t.Fatalf("got %q, want %q", got, test.want)
				}
			}
		})
	}
}

func BenchmarkPrefer(b *testing.B) {
	var devices []rules.Offered
	var ids []string
	for i := range 256 {
		id := fmt.Sprint(i)
		devices, ids = append(devices, at(gpu(id), int64(i/128), fmt.Sprint("pci", i/32), "")), append(ids, id)
	}
	l := first(gpuResource, devices...)
	for b.Loop() {
		if _, err := l.Prefer(ids, nil, 16); err != nil {
			b.Fatal(err)
		}
	}
}
