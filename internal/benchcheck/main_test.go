package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

const output = `goos: linux
pkg: chandler.dev/driver
BenchmarkPrepare/held=0-2      	100	  11000 ns/op	 0.050 prepare-p50-ms	 12 B/op
BenchmarkPrepare/held=0-2      	100	  12000 ns/op	 0.040 prepare-p50-ms	 12 B/op
BenchmarkPrepare/held=1000-2   	100	  12000 ns/op	 0.046 prepare-p50-ms	 12 B/op
PASS
`

func table(ratio string) string {
	return "# Page\n\n" + heading + "\n\nText with `code`.\n\n| ratio | of | to | |\n|---|---|---|---|\n" +
		"| with 1,000 claims | `./driver` `Prepare/held=1000` `prepare-p50-ms` | `./driver` `Prepare/held=0` `prepare-p50-ms` | " + ratio + " |\n\n## Next\n"
}

// The best run of each benchmark is compared with the page, and the tolerance is a quarter in both
// directions.
func TestCompare(t *testing.T) {
	measured := make(map[result]float64)
	readResults(measured, "./driver", []byte(output))
	for ratio, wrong := range map[string]bool{"1.15": false, "0.93": false, "1.43": false, "0.91": true, "1.45": true} { // measured: 0.046/0.040
		rows, err := readTable(table(ratio))
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := compare(&out, rows, measured); (err != nil) != wrong {
			t.Errorf("ratio %s on the page: %v\n%s", ratio, err, out.String())
		}
	}
	rows, _ := readTable(table("0"))
	for dividend, wrong := range map[float64]bool{0: false, 1: true} {
		measured := map[result]float64{rows[0].dividend: dividend, rows[0].per: 1000}
		if err := compare(&bytes.Buffer{}, rows, measured); (err != nil) != wrong {
			t.Errorf("ratio 0 on the page, %v of 1000 measured: %v", dividend, err)
		}
	}
	rows[0].per.benchmark = "BenchmarkMissing"
	if err := compare(&bytes.Buffer{}, rows, measured); err == nil || !strings.Contains(err.Error(), "BenchmarkMissing") {
		t.Errorf("a benchmark without a result: %v", err)
	}
}

func TestReadTable(t *testing.T) {
	for text, want := range map[string]string{
		"# Page\n":                "no section",
		heading + "\n\nNo table.": "no row",
		table("about one"):        "about one",
		strings.Replace(table("1"), "`./driver`", "", 1): "not a package",
	} {
		if _, err := readTable(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	text, err := os.ReadFile("../../" + page)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := readTable(string(text)); err != nil {
		t.Errorf("%s: %v", page, err)
	}
}
