package driver

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
)

// momentary are the values on recorded hosts that change while devices work, with those of an idle
// host. Idle GPUs reduce the speed of their links.
var momentary = []struct {
	file *regexp.Regexp
	idle string
}{
	{regexp.MustCompile(`(/current_link_speed --\n)[^\n]*`), "${1}2.5 GT/s PCIe"},
	{regexp.MustCompile(`(/power/runtime_status --\n)[^\n]*`), "${1}active"},
	{regexp.MustCompile(`(/temp1_input --\n)[^\n]*`), "${1}31000"},
	{regexp.MustCompile(`(/temp --\n)[^\n]*`), "${1}31"},
	{regexp.MustCompile(`(/tt_aiclk --\n)[^\n]*`), "${1}500"},
	{regexp.MustCompile(`(heartbeat --\n)[^\n]*`), "${1}7"},
	{regexp.MustCompile(`(/npu_busy_time_us --\n)[^\n]*`), "${1}12"},
}

// Slices do not change with the load of the devices, on any recorded host.
func TestSlicesDoNotChangeWithLoad(t *testing.T) {
	hosts, err := filepath.Glob("../discovery/families/*/testdata/*.host")
	if err != nil || len(hosts) < 100 {
		t.Fatalf("%d recorded hosts, %v", len(hosts), err)
	}
	published := func(record []byte) resourceslice.Pool {
		host, err := recorded.Parse(record)
		if err != nil {
			t.Fatal(err)
		}
		found := scan.ReadHost(&discovery.Host{FS: host.FS()}, families.All)
		resources, _ := pool.BuildPool(pool.Input{Snapshot: (&rules.Rules{}).ApplyTo(found), Features: features.All()})
		return resources
	}
	changed := make(map[*regexp.Regexp]int)
	for _, name := range hosts {
		if filepath.Base(name) == "broken.host" {
			continue // its overheated devices recover
		}
		busy, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		idle := busy
		for _, m := range momentary {
			changed[m.file] += len(m.file.FindAll(idle, -1))
			idle = m.file.ReplaceAll(idle, []byte(m.idle))
		}
		if diff := cmp.Diff(published(busy), published(idle)); diff != "" {
			t.Errorf("%s: slices change with the load (-busy +idle):\n%s", name, diff)
		}
	}
	for _, m := range momentary {
		if changed[m.file] == 0 {
			t.Errorf("no host has %s", m.file)
		}
	}
}
