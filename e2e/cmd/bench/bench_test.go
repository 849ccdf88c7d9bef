package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
)

// TestRecordedHost checks that the families describe each GPU of the made-up server as a whole and
// healthy device, and all virtual functions as interchangeable. The device must have the name that the claims use, and the render node whose
// removal makes the device unhealthy.
func TestRecordedHost(t *testing.T) {
	const n, functions = gpusPerDomain + 2, 18
	host, err := recordedHost(n, functions)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "gpus.host")
	if err := os.WriteFile(file, []byte(host), 0o644); err != nil {
		t.Fatal(err)
	}
	snapshot := scan.ReadHost(discoverytest.ReadHost(t, file), families.All)
	if len(snapshot.Devices) != n+functions || len(snapshot.Problems) > 0 {
		t.Fatalf("%d devices, problems %v", len(snapshot.Devices), snapshot.Problems)
	}
	for i := range n {
		d, found := snapshot.Lookup(newGPU(i).device())
		if !found || d.Health.Status != discovery.Healthy || d.PartOf != nil || len(d.Edits.DeviceNodes) != 3 || d.Edits.DeviceNodes[2].Path != newGPU(i).renderNode() {
			t.Errorf("GPU %d: %+v", i, d)
		}
	}
	for i := range snapshot.Devices {
		if d := &snapshot.Devices[i]; d.Attributes.String("kind") != "gpu" && d.Interchangeable != joinedFunctions {
			t.Errorf("the virtual function %+v", d)
		}
	}
}

func TestTimings(t *testing.T) {
	var all timings
	for i := range 200 {
		all = append(all, time.Duration(200-i)*time.Millisecond)
	}
	if got := all.String(); got != "100 / 198" {
		t.Errorf("200 timings: %s", got)
	}
	if got := timings(nil).String(); got != "" {
		t.Errorf("no timings: %s", got)
	}
	for want, d := range map[string]time.Duration{"0.25": 250 * time.Microsecond, "9.99": 9990 * time.Microsecond, "12.3": 12340 * time.Microsecond, "123": 123456 * time.Microsecond} {
		if got := milliseconds(d); got != want {
			t.Errorf("%s: %s, want %s", d, got, want)
		}
	}
}

func TestRotated(t *testing.T) {
	claims := []*drapb.Claim{{Name: "a"}, {Name: "b"}, {Name: "c"}}
	var got string
	for _, claim := range rotated(claims, 4) {
		got += claim.Name
	}
	if got != "bca" || claims[0].Name != "a" {
		t.Errorf("rotated by 4: %s of %v", got, claims)
	}
}
