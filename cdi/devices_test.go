package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Runtimes load the spec of devices. It is written only after a change, and is removed with the
// last device.
func TestDevicesSpec(t *testing.T) {
	dir := Dir{Path: t.TempDir()}
	file := filepath.Join(dir.Path, "chandler.dev-device.json")
	devices := []Device{gpu("gpu-a"), gpu("gpu-b")}
	keep := func() os.FileInfo {
		t.Helper()
		texts, err := dir.DevicesSpecs(devices)
		if err == nil {
			err = dir.KeepDevicesSpecs(texts)
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
	if err := dir.KeepDevicesSpecs(nil); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("it stays without devices: %v", err)
	}
}

// Container runtimes run each hook once per container, regardless of the number of devices and of
// other specs.
func TestHooksRunOnceForAContainer(t *testing.T) {
	dir := Dir{Path: t.TempDir()}
	device := func(name, family string, hooks ...string) Device {
		d := Device{Name: name, Family: family, Edits: specs.ContainerEdits{Env: []string{"HAS_" + name + "=1"}}}
		for _, hook := range hooks {
			d.Edits.Hooks = append(d.Edits.Hooks, &specs.Hook{HookName: "createContainer", Path: "/bin/" + hook})
		}
		return d
	}
	only := Device{Name: "only-hooks", Family: "x", Edits: specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createContainer", Path: "/bin/c"}}}}
	keep := func(devices ...Device) (files []string) {
		t.Helper()
		texts, err := dir.DevicesSpecs(devices)
		if err == nil {
			err = dir.KeepDevicesSpecs(texts)
		}
		if err != nil {
			t.Fatal(err)
		}
		paths, err := filepath.Glob(dir.Path + "/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			files = append(files, filepath.Base(path))
		}
		return files
	}
	files := keep(device("a", "x", "a", "b"), device("b", "x", "a", "b"), device("c", "x", "a", "c"), device("channel", "x"), device("d", "y", "a", "b"), device("e", "y", "a", "b"), only)
	if want := "chandler.dev-device.json chandler.dev-device_x.json chandler.dev-device_y.json"; strings.Join(files, " ") != want {
		t.Errorf("files %q, want %q", files, want)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir.Path), cdi.WithAutoRefresh(false))
	if err != nil || len(cache.GetErrors()) > 0 {
		t.Fatalf("%v, %v", cache.GetErrors(), err)
	}
	for names, want := range map[string]string{
		"a": "/bin/a /bin/b", "a b": "/bin/a /bin/b /bin/b", "a c": "/bin/a /bin/b /bin/c", "d": "/bin/a /bin/b", "d e": "/bin/a /bin/b", "d e channel": "/bin/a /bin/b", "channel": "", "only-hooks": "/bin/c",
	} {
		var ids []string
		for name := range strings.FieldsSeq(names) {
			ids = append(ids, DeviceID(name))
		}
		var container oci.Spec
		if unresolved, err := cache.InjectDevices(&container, ids...); err != nil || len(unresolved) > 0 {
			t.Fatalf("%s: %v, %q", names, err, unresolved)
		}
		var called []string
		if container.Hooks != nil {
			for _, hook := range container.Hooks.CreateContainer {
				called = append(called, hook.Path)
			}
		}
		if strings.Join(called, " ") != want {
			t.Errorf("a container with %s: hooks %q, want %q", names, called, want)
		}
	}
	if files := keep(device("a", "x", "a")); len(files) != 1 || files[0] != "chandler.dev-device_x.json" {
		t.Errorf("of what is there no more, files are left: %q", files)
	}
	if files := keep(); len(files) > 0 {
		t.Errorf("left are %q", files)
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
