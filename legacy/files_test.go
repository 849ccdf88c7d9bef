package legacy

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/hostfile"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list"
)

// nic is a device with a file of the host.
func nic(id string) discovery.Device {
	d := gpu(id)
	d.Files = []discovery.HostFile{{Path: "/run/info/{resource}-" + id + ".json", Text: "what " + id + " is"}}
	return d
}

// withFiles gives a plugin a directory for files of the host, and returns where
// that of an ID of example.com/gpu is.
func withFiles(t *testing.T, config *Config) (file func(id string) string) {
	t.Helper()
	root := t.TempDir()
	config.HostFiles = hostfile.Writer{Root: root, Dirs: []string{"/run/info"}}
	if err := os.MkdirAll(filepath.Join(root, "run/info"), 0o755); err != nil {
		t.Fatal(err)
	}
	return func(id string) string { return filepath.Join(root, "run/info", "example.com-gpu-"+id+".json") }
}

func there(name string) bool {
	_, err := os.Lstat(name)
	return err == nil
}

func TestHostFilesGoWithTheGrant(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	file := withFiles(t, &config)
	other := file("of-another-plugin")
	stale := file("a")
	for _, name := range []string{other, stale} {
		if err := os.WriteFile(name, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	first := New(config)
	first.Publish(snapshot(nic("a"), nic("b")))
	stop := run(t, first)
	registered := k.Plugin(gpuResource, 1)
	registered.Says(t, "a b")
	if _, err := registered.Allocate("a"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file("a"))
	if err != nil || string(text) != "what a is" || there(file("b")) {
		t.Fatalf("a: %q, %v; b: %t", text, err, there(file("b")))
	}
	k.Hold("pod", gpuResource, "a")
	kubelettest.Eventually(t, func() bool { who, _ := first.Holder("gpu-a"); return strings.HasPrefix(who, "default/pod") }, func() string { return "not confirmed" })
	stop()
	if !there(file("a")) {
		t.Error("the file went with the agent, and the pod is still there")
	}

	// The host was started anew, without what was in memory.
	if err := os.Remove(file("a")); err != nil {
		t.Fatal(err)
	}
	second := New(config)
	second.Publish(snapshot(nic("a"), nic("b")))
	run(t, second)
	<-second.Ready()
	if !there(file("a")) {
		t.Error("the file of what is held is not there after a restart")
	}
	k.Hold("pod", gpuResource)
	kubelettest.Eventually(t, func() bool { return !there(file("a")) }, func() string { return "the file is left over" })
	if !there(other) {
		t.Error("another's file was removed")
	}
}

// A grant that ended while no agent ran leaves no file.
func TestHostFilesOfWhatEndedMeanwhile(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	file := withFiles(t, &config)
	first := New(config)
	first.Publish(snapshot(nic("a")))
	stop := run(t, first)
	registered := k.Plugin(gpuResource, 1)
	registered.Says(t, "a")
	if _, err := registered.Allocate("a"); err != nil {
		t.Fatal(err)
	}
	k.Hold("pod", gpuResource, "a")
	kubelettest.Eventually(t, func() bool { who, _ := first.Holder("gpu-a"); return strings.HasPrefix(who, "default/pod") }, func() string { return "not confirmed" })
	stop()
	k.Hold("pod", gpuResource)
	run(t, New(config))
	kubelettest.Eventually(t, func() bool { return !there(file("a")) }, func() string { return "the file is left over" })
}

func TestHostFilesOfThePluginBefore(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	k.Hold("pod", gpuResource, "a")
	config := configFor(k)
	file := withFiles(t, &config)
	p := New(config)
	p.Publish(snapshot(nic("a")))
	run(t, p)
	kubelettest.Eventually(t, func() bool { return there(file("a")) }, func() string { return "no file of what a pod had already" })
}

func TestHostFileThatCannotBeWritten(t *testing.T) {
	h := newHoldings(t)
	config := Config{}
	file := withFiles(t, &config)
	h.files = config.HostFiles
	u := nicUnit()
	h.files.Files.FS = &disktest.Disk{Before: func(op disktest.Op, _ string) error {
		if op == disktest.Rename {
			return errors.New("no space")
		}
		return nil
	}}
	if _, err := h.grant([]*holding{newHolding(gpuResource, "a", u, testTime)}, func() error { return nil }); err == nil {
		t.Error("granted without the file that goes with it")
	}
	if len(h.of(gpuResource)) > 0 || there(file("a")) {
		t.Errorf("held %v, file %t", h.of(gpuResource), there(file("a")))
	}
}

func TestHostFilesThatNobodyReads(t *testing.T) {
	h := newHoldings(t)
	h.files = hostfile.Writer{Root: t.TempDir(), Dirs: []string{"/run/info"}}
	unwritten, err := h.grant([]*holding{newHolding(gpuResource, "a", nicUnit(), time.Time{})}, func() error { return nil })
	if err != nil || len(unwritten) != 1 {
		t.Errorf("%v, unwritten %q", err, unwritten)
	}
}

// nicUnit is the unit of a device with a file of the host.
func nicUnit() *list.Unit { return unitOf(nic("a")) }
