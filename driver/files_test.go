package driver

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"chandler.dev/cdi/atomicfile"
	"chandler.dev/discovery"
	"chandler.dev/internal/hostfile"
)

// nic is a device with a file of the host, under a classic name.
func nic(name string) discovery.Device {
	d := gpu(name, 1)
	d.Offers = []discovery.Offer{{Resource: "example.com/net", IDs: []string{name}}}
	d.Files = []discovery.HostFile{{Path: "/run/info/{resource}-" + name + ".json", Text: "what " + name + " is"}}
	return d
}

// withFiles gives the driver a directory for files of the host, and returns
// where that of a device is.
func (b *bench) withFiles() (file func(device string) string) {
	b.t.Helper()
	root := b.t.TempDir()
	b.config.HostFiles = hostfile.Writer{Root: root, Dirs: []string{"/run/info"}}
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
	// Unprepare needs nothing but the record.
	b.restart()
	mustUnprepare(t, b, c)
	if exists(file("a")) || exists(b.recordFile(c)) {
		t.Errorf("left over: file %t, record %t", exists(file("a")), exists(b.recordFile(c)))
	}
}

// A file that several claims' devices have is there until the last has ended.
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
	b.config.HostFiles.Files.Before = func(op atomicfile.Op, _ string) error {
		if op == atomicfile.Rename {
			return errors.New("no space")
		}
		return nil
	}
	b.restart().offers(nic("a"))
	mustRefuse(t, b, claim("c", "a"), "no space")
	if exists(file("a")) || exists(b.recordFile(claim("c"))) || exists(b.specFile(claim("c"))) {
		t.Error("something of the claim is left")
	}
	b.config.HostFiles.Files.Before = nil
	b.restart().offers(nic("a"))
	mustPrepare(t, b, claim("c", "a"))
	if !exists(file("a")) {
		t.Error("no file")
	}
}

// A claim that is prepared under another name has no file of the name before.
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

// A device without a classic name has no file that is called by it, and one
// whose directory nobody made none either.
func TestHostFilesThatNobodyReads(t *testing.T) {
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
