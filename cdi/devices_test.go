package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// The spec of devices is what runtimes load. It is written again when something is
// different, and only then, and goes with the last device.
func TestDevicesSpec(t *testing.T) {
	dir := Dir{Path: t.TempDir()}
	file := filepath.Join(dir.Path, "chandler.dev-device.json")
	devices := []Device{gpu("gpu-a"), gpu("gpu-b")}
	keep := func() os.FileInfo {
		t.Helper()
		text, err := dir.DevicesSpec(devices)
		if err == nil {
			err = dir.KeepDevicesSpec(text)
		}
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		return info
	}
	first := keep()
	if !os.SameFile(first, keep()) {
		t.Error("the same spec was written again")
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir.Path), cdi.WithAutoRefresh(false))
	if err != nil || len(cache.GetErrors()) > 0 || cache.GetDevice(DeviceID("gpu-b")) == nil {
		t.Errorf("runtimes find %v, %v, %v", cache.ListDevices(), cache.GetErrors(), err)
	}
	if err := os.WriteFile(file, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	keep()
	if data, err := os.ReadFile(file); err != nil || !strings.Contains(string(data), "gpu-b") {
		t.Errorf("damaged, and not written again: %s, %v", data, err)
	}
	if uids, err := dir.Claims(); err != nil || len(uids) > 0 {
		t.Errorf("it is taken for that of a claim: %q, %v", uids, err)
	}
	if err := dir.KeepDevicesSpec(nil); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("it stays without devices: %v", err)
	}
}

func TestCheck(t *testing.T) {
	for name, device := range map[string]Device{
		"nothing":  {Name: "gpu"},
		"bad name": {Name: "a/b", Edits: gpu("").Edits},
		"bad hook": {Name: "gpu", Edits: specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "never", Path: "/bin/true"}}}},
	} {
		if Check(device) == nil {
			t.Errorf("%s: runtimes would not take it", name)
		}
	}
	if err := Check(gpu("gpu")); err != nil {
		t.Error(err)
	}
}
