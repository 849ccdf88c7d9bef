package legacy

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/hostfile"
	"chandler.dev/internal/ledger"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

// nic is a device with a host file.
func nic(id string) rules.Offered {
	d := listtest.GPU(id)
	d.Files = []discovery.HostFile{{Path: "/run/info/{resource}-" + id + ".json", Text: "what " + id + " is"}}
	return d
}

// withFiles gives a plugin a directory for host files. It returns a function for the path of the
// file of an ID of example.com/gpu, and a function that replaces the plugin's ledger.
func withFiles(t *testing.T, k *kubelettest.Kubelet, config *Config) (file func(id string) string, again func()) {
	t.Helper()
	root := t.TempDir()
	files := ledger.HostFiles{Writer: hostfile.Writer{Root: root, Dirs: []string{"/run/info"}}}
	if err := os.MkdirAll(filepath.Join(root, "run/info"), 0o755); err != nil {
		t.Fatal(err)
	}
	again = func() { config.Ledger = ledgerOf(k, files) }
	again()
	return func(id string) string { return filepath.Join(root, "run/info", "example.com-gpu-"+id+".json") }, again
}

func there(name string) bool {
	_, err := os.Lstat(name)
	return err == nil
}

func TestHostFilesGoWithTheGrant(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	file, again := withFiles(t, k, &config)
	other := file("of-another-plugin")
	stale := file("a")
	for _, name := range []string{other, stale} {
		if err := os.WriteFile(name, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	first := New(config)
	publish(first, listtest.Snapshot(nic("a"), nic("b")))
	stop := run(t, first)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a b")
	if _, err := registered.AllocateIDs("a"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file("a"))
	if err != nil || string(text) != "what a is" || there(file("b")) {
		t.Fatalf("a: %q, %v; b: %t", text, err, there(file("b")))
	}
	k.HoldIDs("pod", listtest.Resource, "a")
	kubelettest.EventuallyTrue(t, func() bool { who, _ := holder(first, "gpu-a"); return strings.HasPrefix(who, "default/pod") }, func() string { return "not confirmed" })
	stop()
	if !there(file("a")) {
		t.Error("the file went with the agent, and the pod is still there")
	}

	// The host was rebooted and has lost the files in memory.
	if err := os.Remove(file("a")); err != nil {
		t.Fatal(err)
	}
	again()
	second := New(config)
	publish(second, listtest.Snapshot(nic("a"), nic("b")))
	run(t, second)
	<-second.Ready()
	if !there(file("a")) {
		t.Error("the file of what is held is not there after a restart")
	}
	k.HoldIDs("pod", listtest.Resource)
	kubelettest.EventuallyTrue(t, func() bool { return !there(file("a")) }, func() string { return "the file is left over" })
	if !there(other) {
		t.Error("another's file was removed")
	}
}

// A grant that ended while no agent was running leaves no file.
func TestHostFilesOfWhatEndedMeanwhile(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	file, again := withFiles(t, k, &config)
	first := New(config)
	publish(first, listtest.Snapshot(nic("a")))
	stop := run(t, first)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a")
	if _, err := registered.AllocateIDs("a"); err != nil {
		t.Fatal(err)
	}
	k.HoldIDs("pod", listtest.Resource, "a")
	kubelettest.EventuallyTrue(t, func() bool { who, _ := holder(first, "gpu-a"); return strings.HasPrefix(who, "default/pod") }, func() string { return "not confirmed" })
	stop()
	k.HoldIDs("pod", listtest.Resource)
	again()
	run(t, New(config))
	kubelettest.EventuallyTrue(t, func() bool { return !there(file("a")) }, func() string { return "the file is left over" })
}

func TestHostFilesOfThePluginBefore(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	k.HoldIDs("pod", listtest.Resource, "a")
	config := configFor(k)
	file, _ := withFiles(t, k, &config)
	p := New(config)
	publish(p, listtest.Snapshot(nic("a")))
	run(t, p)
	kubelettest.EventuallyTrue(t, func() bool { return there(file("a")) }, func() string { return "no file of what a pod had already" })
}

// Devices are not allocated without their host files.
func TestHostFileThatCannotBeWritten(t *testing.T) {
	k := kubelettest.New(t)
	config := configFor(k)
	file, _ := withFiles(t, k, &config)
	failing := ledger.HostFiles{Writer: hostfile.Writer{Root: filepath.Dir(filepath.Dir(filepath.Dir(file("a")))), Dirs: []string{"/run/info"}}}
	failing.Files.FS = &disktest.Disk{Before: func(op disktest.Op, _ string) error {
		if op == disktest.Rename {
			return errors.New("no space")
		}
		return nil
	}}
	config.Ledger = ledgerOf(k, failing)
	p := New(config)
	open(t, p)
	if _, err := p.allocateIDs(t.Context(), listsOf(nic("a"))[listtest.Resource], listtest.Resource, [][]string{{"a"}}); err == nil {
		t.Error("granted without the file that goes with it")
	}
	if given := p.config.Ledger.View(nil).OwnGrants(); len(given) > 0 || there(file("a")) {
		t.Errorf("given %v, file %t", given, there(file("a")))
	}
}

// If the directory of host files does not exist, nothing reads them, and the device is allocated
// without a file.
func TestUnreadHostFiles(t *testing.T) {
	k := kubelettest.New(t)
	config := configFor(k)
	config.Ledger = ledgerOf(k, ledger.HostFiles{Writer: hostfile.Writer{Root: t.TempDir(), Dirs: []string{"/run/info"}}})
	p := New(config)
	open(t, p)
	if _, err := p.allocateIDs(t.Context(), listsOf(nic("a"))[listtest.Resource], listtest.Resource, [][]string{{"a"}}); err != nil {
		t.Error(err)
	}
}
