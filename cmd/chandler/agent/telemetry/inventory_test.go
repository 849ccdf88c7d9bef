package telemetry

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/inventory"
)

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
	facts := PlacedFacts(s.placed, s.state.View, &s.said, func(types.UID) time.Time { return given })
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
