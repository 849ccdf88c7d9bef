package publishtest

import (
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/sysfs"
)

const familiesDir = "../../../discovery/families"

// No slice of a recorded host is written because of the load of its devices, or because network
// interfaces are in pods.
func TestLoadWritesNoSlices(t *testing.T) {
	files, err := HostFiles(familiesDir)
	if err != nil || len(files) < 100 {
		t.Fatalf("%d recorded hosts, %v", len(files), err)
	}
	changed, interfaces := make(map[string]int), 0
	every := 1
	if discoverytest.IsBrief() {
		every = 8
	}
	for i, file := range files {
		if i%every != 0 {
			continue
		}
		for _, all := range []bool{false, true} {
			got, err := Replay{Families: families.All, Cycles: 1, AllAttributes: all}.Run(t.Context(), file)
			if err != nil {
				t.Fatal(err)
			}
			if got.Writes > 0 || got.Scans != len(cycle) {
				t.Errorf("%s, all attributes %t: %+v, want no writes", file, all, got)
			}
			interfaces += got.Interfaces
		}
		tree, err := readTree(file)
		if err != nil {
			t.Fatal(err)
		}
		_, ends := withLoad(tree, suspended)
		for end, n := range ends {
			changed[end] += n
		}
	}
	if discoverytest.IsBrief() {
		return
	}
	for end := range idleValues {
		if changed[end] == 0 {
			t.Errorf("no host has a file *%s", end)
		}
	}
	if changed["power_state"] == 0 || interfaces == 0 {
		t.Errorf("%d accelerators can be suspended, and %d network interfaces moved", changed["power_state"], interfaces)
	}
}

// The number of writes has all slices that do depend on the load or on pods.
func TestReplayCountsWrites(t *testing.T) {
	withSpeed := slices.Clone(families.All)
	i := slices.IndexFunc(withSpeed, func(f *discovery.Family) bool { return f.Name == "amdgpu" })
	changed := *withSpeed[i]
	changed.Describe = func(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
		devices, problems := withSpeed[i].Describe(host, found)
		for _, d := range devices {
			speed, _ := sysfs.At(host.FS, d.Source).Text("current_link_speed")
			d.Attributes.SetString("model", strings.ReplaceAll(speed, " ", "-"))
		}
		return devices, problems
	}
	slow := slices.Clone(withSpeed)
	slow[i] = &changed
	for name, test := range map[string]struct {
		host   string
		replay Replay
		want   int
	}{
		"an attribute has the present link speed": {"amdgpu/testdata/mi210x8.host", Replay{Families: slow, Cycles: 3}, 3 * 4},
		"the same without that attribute":         {"amdgpu/testdata/mi210x8.host", Replay{Families: families.All, Cycles: 3}, 0},
		"no claim has the network functions":      {"sriovnet/testdata/guest.host", Replay{Families: families.All, Cycles: 2, NoClaims: true}, 2 * 2},
		"an overheated device":                    {overheated, Replay{Families: families.All, Cycles: 1}, 4},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := test.replay.Run(t.Context(), familiesDir+"/"+test.host)
			if err != nil || got.Writes != test.want || got.Scans != test.replay.Cycles*len(cycle) || got.Devices == 0 {
				t.Errorf("%+v, %v; want %d writes", got, err, test.want)
			}
		})
	}
}

// BenchmarkChurn counts the writes of slices on all recorded hosts. docs/benchmarks.md has the result.
func BenchmarkChurn(b *testing.B) {
	files, err := HostFiles(familiesDir)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		var scans, writes int
		for _, file := range files {
			result, err := Replay{Families: families.All, Cycles: 1}.Run(b.Context(), file)
			if err != nil {
				b.Fatal(err)
			}
			scans, writes = scans+result.Scans, writes+result.Writes
		}
		b.ReportMetric(float64(scans), "scans")
		b.ReportMetric(float64(writes), "writes")
	}
}
