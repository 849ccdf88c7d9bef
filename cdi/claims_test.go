package cdi

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
)

const uid = types.UID("6f8a1c3e-0d5b-4c7a-9a53-2f4c3b1f7a10")

func gpu(name string) Device {
	return Device{Name: name, Edits: specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/dri/renderD128", HostPath: "/dev/dri/renderD128", Type: "c", Major: 226, Minor: 128, Permissions: "rw"},
			{Path: "/dev/kfd", HostPath: "/dev/kfd", Permissions: "rw"},
			{Path: "/dev/dri/renderD128", HostPath: "/dev/dri/renderD128", Permissions: "rwm"},
		},
		Mounts: []*specs.Mount{{HostPath: "/opt/rocm", ContainerPath: "/opt/rocm", Options: []string{"ro"}}},
		Env:    []string{"A=<1>"},
	}}
}

func TestWrittenSpecIsWhatRuntimesLoad(t *testing.T) {
	dir := Dir{Path: filepath.Join(t.TempDir(), "not", "yet")}
	name := Name(uid, 0, "pci-0000-19-00-0", "")
	if err := dir.WriteClaim(uid, []Device{gpu(name)}); err != nil {
		t.Fatal(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir.Path), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	if errs := cache.GetErrors(); len(errs) > 0 {
		t.Fatal(errs)
	}
	device := cache.GetDevice(ID(name))
	if device == nil {
		t.Fatalf("runtimes do not find %s among %v", ID(name), cache.ListDevices())
	}
	var paths []string
	for _, node := range device.ContainerEdits.DeviceNodes {
		paths = append(paths, node.Path)
	}
	if diff := cmp.Diff([]string{"/dev/dri/renderD128", "/dev/kfd"}, paths); diff != "" {
		t.Errorf("nodes are not each there once (-want +got):\n%s", diff)
	}
	if got := device.GetSpec().Version; got != "0.5.0" {
		t.Errorf("version is %s, want the least that knows hostPath", got)
	}
}

// A runtime that cannot move an interface must not accept the spec. The container's OCI
// specification shows the effect of the spec.
func TestInterfaceAsksForTheVersionThatMovesIt(t *testing.T) {
	dir := Dir{Path: t.TempDir(), RuntimeRoot: "/simulated"}
	name := Name(uid, 0, "pci-0000-16-01-2", "")
	edits := specs.ContainerEdits{NetDevices: []*specs.LinuxNetDevice{{HostInterfaceName: "ens1f0v2", Name: "net1"}}}
	if err := dir.WriteClaim(uid, []Device{{Name: name, Edits: edits}}); err != nil {
		t.Fatal(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir.Path), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	container := &oci.Spec{Linux: &oci.Linux{}}
	if _, err := cache.InjectDevices(container, ID(name)); err != nil {
		t.Fatal(err)
	}
	if got := container.Linux.NetDevices["ens1f0v2"]; got.Name != "net1" {
		t.Errorf("interfaces of the container: %v", container.Linux.NetDevices)
	}
	if got := cache.GetDevice(ID(name)).GetSpec().Version; got != "1.1.0" {
		t.Errorf("version is %s, want 1.1.0", got)
	}
}

func TestSpecIsTheSameForTheSameDevices(t *testing.T) {
	dir := Dir{Path: t.TempDir()}
	devices := []Device{gpu("a"), gpu("b")}
	first, err := dir.renderClaim(uid, devices)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		again, _ := dir.renderClaim(uid, devices)
		if string(again) != string(first) {
			t.Fatal("the bytes differ")
		}
	}
	if len(devices[0].Edits.DeviceNodes) != 3 {
		t.Error("the edits that were passed in were modified")
	}
}

// TestSameSpecIsNotWrittenAgain writes a spec twice, and then a spec of another device.
func TestSameSpecIsNotWrittenAgain(t *testing.T) {
	renames := 0
	dir := Dir{Path: t.TempDir(), Files: disk.Files{FS: &disktest.Disk{Before: func(op disktest.Op, _ string) error {
		if op == disktest.Rename {
			renames++
		}
		return nil
	}}}}
	for i, step := range []struct {
		device  string
		renames int
	}{{"a", 1}, {"a", 1}, {"b", 2}} {
		if err := dir.WriteClaim(uid, []Device{gpu(step.device)}); err != nil {
			t.Fatal(err)
		}
		if renames != step.renames {
			t.Errorf("after %d writes the spec was replaced %d times, want %d", i+1, renames, step.renames)
		}
	}
}

func TestClaimsIgnoresForeignFiles(t *testing.T) {
	dir := Dir{Path: t.TempDir()}
	for _, name := range []string{"nvidia.yaml", "chandler.dev-device.json", "chandler.dev-claim_x.yaml", ".chandler.dev-claim_y.json.12.tmp", "chandler.dev-claim_.json"} {
		if err := os.WriteFile(filepath.Join(dir.Path, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := dir.WriteClaim(uid, []Device{gpu("a")}); err != nil {
		t.Fatal(err)
	}
	got, err := dir.Claims()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]types.UID{uid}, got); diff != "" {
		t.Error(diff)
	}
	if err := dir.RemoveTemporary(0); err != nil {
		t.Fatal(err)
	}
	if files, _ := filepath.Glob(filepath.Join(dir.Path, ".*")); len(files) > 0 {
		t.Errorf("left behind: %v", files)
	}
	for range 2 {
		if err := dir.RemoveClaim(uid); err != nil {
			t.Error(err)
		}
	}
	if got, _ := (Dir{Path: filepath.Join(dir.Path, "missing")}).Claims(); got != nil {
		t.Errorf("a missing directory has claims %v", got)
	}
}

func TestClaimDevices(t *testing.T) {
	dir := Dir{Path: t.TempDir()}
	if err := dir.WriteClaim(uid, []Device{
		gpu(Name(uid, 0, "pci-0000-19-00-0", "")),
		gpu(Name(uid, 12, "kvm", "11111111-2222-3333-4444-555555555555")),
	}); err != nil {
		t.Fatal(err)
	}
	got, err := dir.ClaimDevices(uid)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"pci-0000-19-00-0", "kvm"} {
		i := slices.IndexFunc(got, func(d Device) bool { return d.Name == want })
		if i < 0 || len(got[i].Edits.DeviceNodes) == 0 {
			t.Errorf("%v lacks %s", got, want)
		}
	}
}

func TestRebase(t *testing.T) {
	edits := specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{{Path: "/dev/a"}, {Path: "/dev/b", HostPath: "/dev/c"}},
		Mounts:      []*specs.Mount{{HostPath: "/lib/x", ContainerPath: "/lib/y"}, {HostPath: "tmpfs", ContainerPath: "/run", Type: "tmpfs"}},
		Hooks:       []*specs.Hook{{HookName: "createContainer", Path: "/bin/hook", Args: []string{"/lib/x"}}},
		Env:         []string{"P=/lib/y"},
	}
	want := specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{{Path: "/dev/a", HostPath: "/sim/dev/a"}, {Path: "/dev/b", HostPath: "/sim/dev/c"}},
		Mounts:      []*specs.Mount{{HostPath: "/sim/lib/x", ContainerPath: "/lib/y"}, {HostPath: "tmpfs", ContainerPath: "/run", Type: "tmpfs"}},
		Hooks:       []*specs.Hook{{HookName: "createContainer", Path: "/bin/hook", Args: []string{"/lib/x"}}},
		Env:         []string{"P=/lib/y"},
	}
	if diff := cmp.Diff(want, RebasePaths(edits, "/sim")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, root := range []string{"", "/"} {
		if diff := cmp.Diff(edits, RebasePaths(edits, root)); diff != "" {
			t.Errorf("root %q changes edits:\n%s", root, diff)
		}
	}
}

func TestErrorsNameFileAndStep(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dir := Dir{Path: filepath.Join(file, "cdi")} // below a file, not even root can create a file
	err := dir.WriteClaim(uid, []Device{gpu("a")})
	if err == nil || !strings.Contains(err.Error(), "write CDI spec "+dir.file(uid)) {
		t.Errorf("error does not name the file: %v", err)
	}
	for name, devices := range map[string][]Device{
		"none":     nil,
		"twice":    {gpu("a"), gpu("a")},
		"bad name": {gpu("a/b")},
		"bad env":  {{Name: "a", Edits: specs.ContainerEdits{Env: []string{"no value"}}}},
	} {
		if err := (Dir{Path: t.TempDir()}).WriteClaim(uid, devices); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if err := dir.WriteClaim("../x", []Device{gpu("a")}); err == nil {
		t.Error("a UID with a slash is no error")
	}
}

func TestFailedWriteLeavesTheOldFile(t *testing.T) {
	dir := Dir{Path: t.TempDir()}
	if err := dir.WriteClaim(uid, []Device{gpu("old")}); err != nil {
		t.Fatal(err)
	}
	old, err := os.ReadFile(dir.file(uid))
	if err != nil {
		t.Fatal(err)
	}
	failure := errors.New("no space left on device")
	for _, step := range []disktest.Op{disktest.Create, disktest.Write, disktest.Rename} {
		dir.Files.FS = &disktest.Disk{Before: func(op disktest.Op, _ string) error {
			if op == step {
				return failure
			}
			return nil
		}}
		if err := dir.WriteClaim(uid, []Device{gpu("new")}); !errors.Is(err, failure) {
			t.Errorf("%s: error is %v", step, err)
		}
		if there, err := os.ReadFile(dir.file(uid)); err != nil || !bytes.Equal(there, old) {
			t.Errorf("%s: the file is %q, %v, want %q", step, there, err, old)
		}
		if entries, _ := os.ReadDir(dir.Path); len(entries) != 1 {
			t.Errorf("%s: left behind: %v", step, entries)
		}
	}
}
