package driver

import (
	"os"
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

// Idle GPUs reduce the speed of their links. Their slices do not change.
func TestSlicesOfIdleGPUs(t *testing.T) {
	busy, err := os.ReadFile("../discovery/families/nvidia/testdata/h100x8.host")
	if err != nil {
		t.Fatal(err)
	}
	speed := regexp.MustCompile(`(/current_link_speed --\n)[^\n]*`)
	if n := len(speed.FindAll(busy, -1)); n < 8 {
		t.Fatalf("the record has %d current speeds", n)
	}
	idle := speed.ReplaceAll(busy, []byte("${1}2.5 GT/s PCIe"))
	published := func(record []byte) resourceslice.Pool {
		host, err := recorded.Parse(record)
		if err != nil {
			t.Fatal(err)
		}
		found := scan.ReadHost(&discovery.Host{FS: host.FS()}, families.All)
		resources, _ := pool.BuildPool(pool.Input{Snapshot: (&rules.Rules{}).ApplyTo(found), Features: features.All()})
		return resources
	}
	if diff := cmp.Diff(published(busy), published(idle)); diff != "" {
		t.Errorf("slices change with the load (-busy +idle):\n%s", diff)
	}
}
