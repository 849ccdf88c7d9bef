package driver

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/hostfile"
)

// nic is a device with a host file and an extended resource name.
func nic(name string) rules.Offered {
	d := gpu(name, 1)
	if name == "b" {
		d.Edits.DeviceNodes[0].Minor = 2
	}
	d.Offers = []discovery.Offer{{Resource: "example.com/net", IDs: []string{name}}}
	d.Files = []discovery.HostFile{{Path: "/run/info/{resource}-" + name + ".json", Text: "what " + name + " is"}}
	return d
}

// withFiles gives the driver a directory for host files. The returned function returns the path of
// a device's file.
func (b *bench) withFiles() (file func(device string) string) {
	b.t.Helper()
	root := b.t.TempDir()
	b.hostFiles = hostfile.Writer{Root: root, Dirs: []string{"/run/info"}}
	if err := os.MkdirAll(filepath.Join(root, "run/info"), 0o755); err != nil {
		b.t.Fatal(err)
	}
	return func(device string) string { return filepath.Join(root, "run/info", "example.com-net-"+device+".json") }
}

func TestHostFilesGoWithTheClaim(t *testing.T) {
	b := newBench(t)
	file := b.withFiles()
	b.restart().offers(nic("a"), nic("b"))
	c := claim("c", "a")
	for _, when := range []string{"first", "again, and it was removed", "after a restart"} {
		if when == "after a restart" {
			b.restart()
		} else {
			mustPrepare(t, b, c)
		}
		if text, err := os.ReadFile(file("a")); err != nil || string(text) != "what a is" || exists(file("b")) {
			t.Fatalf("%s: a: %q, %v; b: %t", when, text, err, exists(file("b")))
		}
		if err := os.Remove(file("a")); when != "after a restart" && err != nil {
			t.Fatal(err)
		}
	}
	// Unprepare needs only the record.
	b.restart()
	mustUnprepare(t, b, c)
	if exists(file("a")) || exists(b.recordFile(c)) {
		t.Errorf("left over: file %t, record %t", exists(file("a")), exists(b.recordFile(c)))
	}
}

// Files are written before a container can get the device, in this order: record, host files, CDI
// spec. They are removed in the reverse order, except the record, which is removed last.
func TestOrderOfSteps(t *testing.T) {
	b := newBench(t)
	file := b.withFiles()
	c := claim("c", "a")
	names := map[string]string{b.recordFile(c): "record", b.specFile(c): "spec", file("a"): "file"}
	var steps []string
	b.disk.Before = func(op disktest.Op, name string) error {
		if names[name] != "" && (op == disktest.Rename || op == disktest.Remove) {
			steps = append(steps, string(op)+" "+names[name])
		}
		return nil
	}
	b.restart().offers(nic("a"))
	mustPrepare(t, b, c)
	mustUnprepare(t, b, c)
	want := []string{"rename record", "rename file", "rename spec", "remove spec", "remove file", "remove record"}
	if !slices.Equal(steps, want) {
		t.Errorf("the steps are %q, want %q", steps, want)
	}
}

// A host file of several claims' devices remains until the last claim ends.
func TestHostFileOfSeveralClaims(t *testing.T) {
	b := newBench(t)
	file := b.withFiles()
	d := nic("a")
	d.Shareable = true
	b.restart().offers(d)
	one, two := claim("one", "a"), claim("two", "a")
	mustPrepare(t, b, one)
	mustPrepare(t, b, two)
	mustUnprepare(t, b, one)
	if !exists(file("a")) {
		t.Fatal("the file is gone, and a claim has the device still")
	}
	mustUnprepare(t, b, two)
	if exists(file("a")) {
		t.Error("the file is left over")
	}
}

func TestHostFileThatCannotBeWritten(t *testing.T) {
	b := newBench(t)
	file := b.withFiles()
	b.disk.Before = func(op disktest.Op, name string) error {
		if op == disktest.Rename && name == file("a") {
			return errors.New("no space")
		}
		return nil
	}
	b.restart().offers(nic("a"))
	mustRefuse(t, b, claim("c", "a"), "no space")
	if exists(file("a")) || !exists(b.recordFile(claim("c"))) || exists(b.specFile(claim("c"))) {
		t.Error("a container can have the device without its file, or the claim has lost it")
	}
	b.disk.Before = nil
	b.restart().offers(nic("a"))
	mustPrepare(t, b, claim("c", "a"))
	if !exists(file("a")) {
		t.Error("no file")
	}
}

// After a claim is prepared under another resource name, the file of the earlier name is gone.
func TestHostFileOfANameBefore(t *testing.T) {
	b := newBench(t)
	file := b.withFiles()
	b.restart().offers(nic("a"))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	renamed := nic("a")
	renamed.Offers[0].Resource = "example.com/other"
	renamed.Edits.DeviceNodes[0].Minor = 5
	b.host["dev/a"] = charDevice(226, 5)
	b.offers(renamed)
	mustPrepare(t, b, c)
	if other := strings.Replace(file("a"), "-net-", "-other-", 1); exists(file("a")) || !exists(other) {
		t.Errorf("file of the name before: %t, of the name now: %t", exists(file("a")), exists(other))
	}
}

// A device without an extended resource name gets no file with the name in its path. No file is
// written if its directory does not exist.
func TestUnreadHostFiles(t *testing.T) {
	b := newBench(t)
	file := b.withFiles()
	unnamed := nic("a")
	unnamed.Offers = nil
	b.restart().offers(unnamed, nic("b"))
	mustPrepare(t, b, claim("c", "a"))
	if err := os.Remove(filepath.Dir(file("b"))); err != nil {
		t.Fatalf("something is in the directory: %v", err)
	}
	mustPrepare(t, b, claim("d", "b"))
	mustUnprepare(t, b, claim("d", "b"))
	if exists(filepath.Dir(file("b"))) {
		t.Error("the directory was made")
	}
}

// The files of a claim with an unreadable record are removed with the record. They are identified
// from the snapshot or from the readable part of the record.
func TestHostFilesOfAnUnreadableRecord(t *testing.T) {
	for name, test := range map[string]struct {
		damage  func([]byte) []byte
		scanned bool
	}{
		"noise":               {func([]byte) []byte { return []byte("noise") }, true},
		"of a newer age":      {func(data []byte) []byte { return reseal(data, age, `"version": 3`) }, false},
		"with another's file": {func(data []byte) []byte { return reseal(data, "net-a.json", "net-b.json") }, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			file := b.withFiles()
			b.restart().offers(nic("a"), nic("b"))
			c, other := claim("c", "a"), claim("other", "b")
			mustPrepare(t, b, c)
			mustPrepare(t, b, other)
			data, err := os.ReadFile(b.recordFile(c))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(b.recordFile(c), append(test.damage(data), ' '), 0o600); err != nil {
				t.Fatal(err)
			}
			b.restart()
			if test.scanned {
				b.offers(nic("a"), nic("b"))
			}
			mustUnprepare(t, b, c)
			if exists(file("a")) || !exists(file("b")) {
				t.Errorf("file of the claim: %t, of the other: %t", exists(file("a")), exists(file("b")))
			}
		})
	}
}
