package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/cmd/chandler/migration"
)

// kubeletDir creates the files of a kubelet and an agent on a node with eight GPUs.
func kubeletDir(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, file, text)
	}
	return dir
}

// sides returns a placement of the eight GPUs.
func sides(api string) string {
	all := make(map[string]string)
	for _, address := range []string{"23", "24", "43", "44", "a3", "a4", "c3", "c4"} {
		all["pci-0000-"+address+"-00-0"] = api
	}
	data, _ := json.Marshal(all)
	return string(data)
}

const (
	agentDir   = "plugins/chandler.dev/"
	claimFile  = agentDir + "claims/u1.record"
	byLimits   = "checksum\n" + `{"version":1,"uid":"u1","namespace":"default","name":"train-extended-resources-x","boot":"b","results":[` + `{"request":"container-0-request-0","device":"pci-0000-23-00-0","source":"pci-0000-23-00-0","silicon":"pci-0000-23-00-0","whole":true},` + `{"request":"container-0-request-0","device":"pci-0000-24-00-0","source":"pci-0000-24-00-0","silicon":"pci-0000-24-00-0","whole":true}]}`
	grantsFile = agentDir + "grants/grants.json"
	oneGrant   = `[{"resource":"amd.com/gpu","id":"0000:23:00.0","devices":["pci-0000-23-00-0"],"silicon":["pci-0000-23-00-0"],"exclusive":true,"container":"default/train main","since":"2026-01-01T00:00:00Z"}]`
	checkpoint = `{"Data":{"PodDeviceEntries":[{"PodUID":"alive","ContainerName":"c","ResourceName":"amd.com/gpu","DeviceIDs":{"0":["0000:44:00.0"]}},{"PodUID":"ended","ContainerName":"c","ResourceName":"amd.com/gpu","DeviceIDs":{"0":["0000:43:00.0"]}}]}}`
)

// migrate returns the output of a migrate command for the eight GPUs.
func migrate(t *testing.T, kubelet string, args ...string) (m migration.Move, devices map[string]migration.Device) {
	t.Helper()
	args = append([]string{"migrate", args[0], "-o", "json", "--node-name=worker", "--kubelet-root", kubelet, "--device-plugin-dir", filepath.Join(kubelet, "device-plugins")}, args[1:]...)
	if err := json.Unmarshal([]byte(mustRun(t, args...)), &m); err != nil {
		t.Fatal(err)
	}
	devices = make(map[string]migration.Device)
	for _, d := range m.Devices {
		devices[d.Device] = d
	}
	return m, devices
}

// A move to DRA waits for the consumers of the device plugin API, of any plugin, and moves all
// other devices. No device is counted twice.
func TestMigratePlanToDRA(t *testing.T) {
	dir := kubeletDir(t, map[string]string{
		agentDir + "config.yaml": header() + "mode: DevicePlugin\n", agentDir + "sides.json": sides("DevicePlugin"), grantsFile: oneGrant,
		"device-plugins/kubelet_internal_checkpoint": checkpoint, "pods/alive/x": "",
	})
	m, devices := migrate(t, dir, "plan", eightGPUs)
	if d := devices["pci-0000-23-00-0"]; d.Fate != placement.Waits || !cmp.Equal(d.WaitsFor, []string{"pod default/train main"}) || d.To != "DRA" {
		t.Errorf("a GPU that a pod has: %+v", d)
	}
	if d := devices["pci-0000-44-00-0"]; d.Fate != placement.Waits || !cmp.Equal(d.WaitsFor, []string{"pod UID/alive c"}) {
		t.Errorf("a GPU that a pod has of another plugin: %+v", d)
	}
	if d := devices["pci-0000-43-00-0"]; d.Fate != placement.Moves || d.From != "DevicePlugin" || d.To != "DRA" {
		t.Errorf("a free GPU: %+v", d)
	}
	if want := []*migration.Resource{{Name: "amd.com/gpu", Moves: 6, Waits: 2, DRA: 8}}; !cmp.Equal(m.Resources, want) {
		t.Errorf("resources %+v", m.Resources[0])
	}
	if notes := strings.Join(m.Notes, "\n"); !strings.Contains(notes, "nothing is counted twice") || !strings.Contains(notes, "lose: hints for the Topology Manager") {
		t.Errorf("notes:\n%s", notes)
	}
}

// A move to the device plugin API waits for claims. The scheduler counts pods with limits against
// the device plugin's devices.
func TestMigratePlanToDevicePlugin(t *testing.T) {
	dir := kubeletDir(t, map[string]string{agentDir + "sides.json": sides("DRA"), agentDir + "mode": "DRA", claimFile: byLimits})
	m, devices := migrate(t, dir, "plan", "--to=DevicePlugin", eightGPUs)
	if d := devices["pci-0000-24-00-0"]; d.Fate != placement.Waits || !cmp.Equal(d.WaitsFor, []string{"claim default/train-extended-resources-x"}) {
		t.Errorf("a GPU that a claim has: %+v", d)
	}
	if want := []*migration.Resource{{Name: "amd.com/gpu", Moves: 6, Waits: 2, DevicePlugin: 6, CountedTwice: 2}}; !cmp.Equal(m.Resources, want) {
		t.Errorf("resources %+v", m.Resources[0])
	}
	if notes := strings.Join(m.Notes, "\n"); !strings.Contains(notes, "have 2 by DRA. The scheduler counts them against the 6 that the device plugin offers, too, so that 4 more fit") {
		t.Errorf("notes:\n%s", notes)
	}
}

// Another configuration moves, excludes and shares devices. A name that both APIs offer causes a
// warning.
func TestMigratePlanToAConfiguration(t *testing.T) {
	dir := kubeletDir(t, map[string]string{agentDir + "config.yaml": header() + "mode: DevicePlugin\n", agentDir + "sides.json": sides("DevicePlugin"), grantsFile: oneGrant})
	next := filepath.Join(dir, "next.yaml")
	at := func(addresses string) string {
		return `cel: device.attributes["resource.kubernetes.io"].pciBusID in [` + addresses + `]`
	}
	write(t, next, header()+"mode: DevicePlugin\nexclude:\n- "+at(`"0000:23:00.0", "0000:24:00.0"`)+"\nresources:\n- name: amd.com/gpu\n  mode: DRA\n  "+at(`"0000:43:00.0"`)+
		"\nsharing:\n- replicas: 2\n  "+at(`"0000:44:00.0"`)+"\n")
	m, devices := migrate(t, dir, "plan", "--next", next, eightGPUs)
	for name, want := range map[string]placement.Fate{"pci-0000-23-00-0": placement.Waits, "pci-0000-24-00-0": placement.Excluded, "pci-0000-43-00-0": placement.Moves, "pci-0000-44-00-0": placement.Changes, "pci-0000-a3-00-0": placement.Stays} {
		if got := devices[name].Fate; got != want {
			t.Errorf("%s %s, want %s", name, got, want)
		}
	}
	if notes := strings.Join(m.Notes, "\n"); !strings.Contains(notes, "amd.com/gpu: the device plugin keeps 5 of them") {
		t.Errorf("notes:\n%s", notes)
	}
}

// The status uses the agent's decisions, and the labels in the agent's directory.
func TestMigrateStatus(t *testing.T) {
	files := map[string]string{
		agentDir + "config.yaml": header() + "mode: DevicePlugin\n", agentDir + "labels.json": `{"chandler.dev/mode":"DRA"}`,
		agentDir + "sides.json": strings.Replace(sides("DRA"), `"pci-0000-23-00-0":"DRA"`, `"pci-0000-23-00-0":"DevicePlugin"`, 1), grantsFile: oneGrant,
	}
	host := t.TempDir()
	mustRun(t, "simulate", host, eightGPUs)
	args := []string{"migrate", "status", "--host-root", host, "--node-name=worker", "--device-plugin-dir=/nowhere", "--kubelet-root"}
	out := mustRun(t, append(args, kubeletDir(t, files))...)
	for _, want := range []string{"pci-0000-23-00-0  amd.com/gpu  DevicePlugin  DRA  waits  pod default/train main", "8 devices: 7 are where they are to be, 1 waits\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	dir := kubeletDir(t, files)
	want := "The kubelet does not report the devices of pods: " + dir + "/pod-resources/kubelet.sock is not there. Its checkpoint is read instead, which may name pods that have ended, and does not name the pods of claims.\n"
	if _, said, err := chandler(append(args, dir)...); err != nil || said != want {
		t.Errorf("without the kubelet's answer: %v, %q, want %q", err, said, want)
	}
	if _, _, err := chandler(append(args, filepath.Join(host, "none"))...); err == nil || !strings.Contains(err.Error(), "the kubelet's directory") {
		t.Errorf("without the kubelet's directory: %v", err)
	}
	delete(files, agentDir+"sides.json")
	if _, _, err := chandler(append(args, kubeletDir(t, files))...); err == nil || !strings.Contains(err.Error(), "no agent has decided") {
		t.Errorf("without an agent: %v", err)
	}
}

// A recorded host has no pods, and damaged files are errors.
func TestMigratePlanOfARecordedHost(t *testing.T) {
	out := mustRun(t, "migrate", "plan", "--node-name=worker", eightGPUs)
	if !strings.Contains(out, "8 devices: 8 move at once") {
		t.Errorf("printed\n%s", out)
	}
	for name, files := range map[string]map[string]string{
		"placement": {agentDir + "sides.json": `{"a":"b"}`},
		"chosen":    {agentDir + "mode": "both"},
		"record":    {claimFile: "checksum\n{"},
		"grants":    {grantsFile: "{"},
		"config":    {agentDir + "config.yaml": "kind: X"},
	} {
		if _, _, err := chandler("migrate", "plan", "--kubelet-root", kubeletDir(t, files), eightGPUs); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, _, err := chandler("migrate", "plan", "--to=Both", eightGPUs); err == nil || !strings.Contains(err.Error(), "want DRA, DevicePlugin or Auto") {
		t.Errorf("a mode that is none: %v", err)
	}
}
