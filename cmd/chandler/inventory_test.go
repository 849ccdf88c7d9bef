package main

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"chandler.dev/internal/inventory"
)

// Each cause is printed once, with the names of the devices that have it.
func TestPrintProblems(t *testing.T) {
	var out strings.Builder
	printProblems(&out, []inventory.Problem{
		{Device: "a", Error: "device node /dev/a: attribute dev: empty\nno driver"},
		{Device: "b", Setting: "passthrough", Error: "no driver"},
	}, func(string) string { return "" })
	if want := "problem: a: device node /dev/a: attribute dev: empty\nproblem: a, b: no driver\n"; out.String() != want {
		t.Errorf("printed\n%s\nwant\n%s", &out, want)
	}
}

// The inventory of a node is read from the files of its agent and its kubelet.
func TestInventory(t *testing.T) {
	dir := kubeletDir(t, map[string]string{
		agentDir + "config.yaml": header() + "mode: DRA\n", agentDir + "sides.json": sides("DevicePlugin"), grantsFile: oneGrant,
		agentDir + "health.json": `{"pci-0000-24-00-0":{"status":"Unhealthy","condition":"link-degraded","reason":"its link is slow","since":"2026-01-01T00:00:00Z"}}`,
	})
	args := []string{"inventory", eightGPUs, "--node-name=worker", "--kubelet-root", dir, "--device-plugin-dir", filepath.Join(dir, "device-plugins")}
	var inv inventory.Inventory
	if err := json.Unmarshal([]byte(mustRun(t, append(args, "-o", "json")...)), &inv); err != nil {
		t.Fatal(err)
	}
	devices := make(map[string]*inventory.Device)
	for _, d := range inv.Devices {
		devices[d.Name] = d
	}
	d := devices["pci-0000-23-00-0"]
	if d == nil || d.State != inventory.Moving || d.Move.To != "DRA" || len(d.Holders) != 1 || d.Holders[0].Pod != "train" || d.Holders[0].Since.Year() != 2026 {
		t.Errorf("a GPU that a pod has and that is to move: %+v", d)
	}
	if d := devices["pci-0000-24-00-0"]; d == nil || d.Health.Since.IsZero() || d.Health.Effect != "None" {
		t.Errorf("a GPU of which the agent wrote down since when it is degraded: %+v", d)
	}
	if d := devices["pci-0000-23-00-0"]; d.Place.Path == "" || d.Place.Root != "pci0000:20" {
		t.Errorf("place %+v", d.Place)
	}
	tree := mustRun(t, args...)
	if !strings.Contains(tree, "→ gpu 23:00.0") || !strings.Contains(tree, "moves to DRA once default/train releases it") {
		t.Errorf("the tree does not say what waits:\n%s", tree)
	}
	if ascii := mustRun(t, append(args, "--ascii")...); !strings.Contains(ascii, "|- > gpu 23:00.0") {
		t.Errorf("in ASCII:\n%s", ascii)
	}
}

// For a recorded host, no kubelet is queried for consumers.
func TestInventoryOfRecordedHost(t *testing.T) {
	tree := mustRun(t, "inventory", eightGPUs)
	if tree != mustRun(t, "discover", eightGPUs, "-o", "tree") || !strings.Contains(tree, "• gpu 23:00.0") {
		t.Errorf("the inventory of a recorded host:\n%s", tree)
	}
	for _, key := range []string{`"physicalDevice": `, `"request": {`, `"total": 8`, `"physicalDevices": [`, `"hasPosition": true`} {
		if data := mustRun(t, "inventory", eightGPUs, "-o", "json"); !strings.Contains(data, key) {
			t.Errorf("no %s in the JSON:\n%s", key, data)
		}
	}
	if yaml := mustRun(t, "inventory", eightGPUs, "-o", "yaml"); !strings.Contains(yaml, "consumersKnown: false\n") {
		t.Errorf("in YAML:\n%.300s", yaml)
	}
}
