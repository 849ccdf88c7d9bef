package agent

import (
	"errors"
	"slices"
	"testing"
	"testing/fstest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/inventory"
)

// Before the first placement the allocations are unknown.
func TestInventoryAtFirst(t *testing.T) {
	if facts, known := (&agent{}).inventoryFacts(); known {
		t.Errorf("an agent that has seen nothing says %+v", facts)
	}
}

// The inventory lists the allocations by both APIs, since when they exist, and which consumer
// delays a move.
func TestInventory(t *testing.T) {
	s := newScraped(t, "gpu-node-1", "nvidia/testdata/h100x8.host", &rules.Rules{})
	names := make([]string, 0, len(s.placed.Snapshot.Devices))
	for _, d := range s.placed.Snapshot.Devices {
		if d.Attributes.String("kind") == "gpu" {
			names = append(names, d.Name)
		}
	}
	s.claim("ml", "train", "train-0", []string{"main"}, names[0], names[1])
	for _, pod := range s.said.Pods {
		for _, c := range pod.Containers {
			for _, claim := range c.DynamicResources {
				claim.ClaimResources = append(claim.ClaimResources, claim.ClaimResources...) // as if listed twice
			}
		}
	}
	s.grant("lab/notebook main", "nvidia.com/gpu", names[2])
	s.placed.Placement.Moving[names[2]] = "moves to API DRA once it is free of lab/notebook main"
	s.placed.Placement.To[names[2]] = discovery.ModeDRA
	given := time.Date(2026, 11, 20, 6, 41, 11, 0, time.UTC)
	facts := placedFacts(s.placed, s.state.view, &s.said, func(types.UID) time.Time { return given })
	facts.At = given.Add(3 * time.Hour)
	inv := inventory.Make(facts)

	held := inv.Device(names[0])
	if held.State != inventory.Held || len(held.Holders) != 1 || held.API != discovery.ModeDRA {
		t.Fatalf("a GPU of a claim: %s, %+v", held.State, held.Holders)
	}
	want := inventory.Holder{Device: names[0], API: discovery.ModeDRA, Namespace: "ml", Pod: "train-0", Container: "main", Claim: "train", Request: "gpu", Since: given}
	if held.Holders[0] != want {
		t.Errorf("holder %+v, want %+v", held.Holders[0], want)
	}
	moving := inv.Device(names[2])
	if moving.State != inventory.Moving || moving.Move.To != discovery.ModeDRA || len(moving.Move.For) != 1 || moving.Move.For[0] != "lab/notebook" {
		t.Errorf("a GPU that waits: %s, %+v", moving.State, moving.Move)
	}
	if h := moving.Holders[0]; h.API != discovery.ModeDevicePlugin || h.Resource != "nvidia.com/gpu" || h.Container != "main" {
		t.Errorf("its holder: %+v", h)
	}
	if state := inv.Device(names[3]).State; state != inventory.Free {
		t.Errorf("a free GPU is %s", state)
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
	a := &agent{metrics: newAgentMetrics("v1", true)}
	a.settings.Store(&a.Settings)
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
	a.configFailure.Store(&worse)
	expect("CH0703 configuration: no such family")
	a.configFailure.Store(nil)
	a.settings.Store(&Settings{})
	a.metrics.observeScan(discovery.Scanned{Late: []string{"nvidia", "rdma"}, Hanging: 3})
	expect("CH0310 scan: no answer in time from nvidia, rdma; their devices count as unreadable")
	a.metrics.observeScan(discovery.Scanned{Hanging: 1})
	expect("CH0310 scan: 1 read of the host not answered by a driver")
	a.metrics.observeScan(discovery.Scanned{})
	expect()
}
