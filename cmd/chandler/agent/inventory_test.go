package agent

import (
	"errors"
	"slices"
	"testing"
	"testing/fstest"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/cmd/chandler/agent/telemetry"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
)

// Before the first placement the allocations are unknown.
func TestInventoryAtFirst(t *testing.T) {
	if facts, known := (&agent{}).inventoryFacts(); known {
		t.Errorf("an agent that has seen nothing says %+v", facts)
	}
}

// A note names the facts that devices lack while the program with these facts does not run. A host
// without the vendor's driver, or without devices of the family, has no such note.
func TestNotesOfMissingPrograms(t *testing.T) {
	program := &discovery.Program{Library: "NVML", Provides: "memory and errors", Driver: "/proc/driver/nvidia", File: "/run/nvml.json"}
	snapshot := &rules.Snapshot{Devices: []rules.Offered{{Device: discovery.Device{Name: "gpu", Family: "nvidia"}}}}
	const driver, facts = "proc/driver/nvidia/version", "run/nvml.json"
	for name, test := range map[string]struct {
		files    []string
		snapshot *rules.Snapshot
		noted    bool
	}{
		"missing":        {[]string{driver}, snapshot, true},
		"facts":          {[]string{driver, facts}, snapshot, false},
		"no driver":      {nil, snapshot, false},
		"no device":      {[]string{driver}, &rules.Snapshot{}, false},
		"not placed yet": {[]string{driver}, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			host := make(fstest.MapFS)
			for _, file := range test.files {
				host[file] = &fstest.MapFile{}
			}
			a := &agent{Config: Config{Families: []*discovery.Family{{Name: "nvidia", Programs: []*discovery.Program{program}}}}, host: &discovery.Host{FS: host}}
			if test.snapshot != nil {
				a.placedDevices.Store(&placement.Placed{Snapshot: test.snapshot})
			}
			notes := a.missingPrograms()
			if (len(notes) == 1) != test.noted || test.noted && (notes[0].Code != "CH0617" || notes[0].Reason != "memory and errors are unknown without NVML") {
				t.Errorf("notes %+v", notes)
			}
		})
	}
}

// The notes of the inventory describe the problems of the node as a whole.
func TestInventoryNotes(t *testing.T) {
	a := &agent{metrics: telemetry.NewMetrics("v1", true)}
	a.settings = newLiveSettings(&a.Config, a.metrics, nil)
	refusal := ""
	names := func() (names []string) {
		for _, note := range a.notes(refusal) {
			names = append(names, note.Code+" "+note.Name+": "+note.Reason)
		}
		return names
	}
	expect := func(want ...string) {
		t.Helper()
		if got := names(); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	expect()
	refusal = "admission webhook denied the request"
	expect("CH0615 ResourceSlices: the API server refuses them: " + refusal)
	refusal = ""
	a.ConfigError = errors.New("no such field")
	expect("CH0703 configuration: no such field")
	worse := errors.New("no such family")
	a.settings.failure.Store(&worse)
	expect("CH0703 configuration: no such family")
	a.settings.failure.Store(nil)
	a.settings.current.Store(&Settings{})
	a.metrics.ObserveScan(scan.Result{Late: []string{"nvidia", "rdma"}, Hanging: 3})
	expect("CH0310 scan: no answer in time from nvidia, rdma; their devices count as unreadable")
	a.metrics.ObserveScan(scan.Result{Hanging: 1})
	expect("CH0310 scan: 1 read of the host not answered by a driver")
	a.metrics.ObserveScan(scan.Result{})
	expect()
}
