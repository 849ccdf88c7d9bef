package disk_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
)

// A record is read as it was written, and none is made of what other files there are.
func TestRecords(t *testing.T) {
	type record struct{ Says string }
	dir := t.TempDir()
	records := disk.Records[record]{Dir: filepath.Join(dir, "records")}
	if names, err := records.Names(); len(names) > 0 || err != nil {
		t.Errorf("names without a directory: %q, %v", names, err)
	}
	if _, err := records.Read("a"); !errors.Is(err, fs.ErrNotExist) || errors.Is(err, disk.ErrUnread) {
		t.Errorf("read nothing: %v", err)
	}
	for _, name := range []string{"b", "a"} {
		if there, err := records.Write(name, &record{Says: name}); there != disk.New || err != nil {
			t.Fatal(there, err)
		}
	}
	for _, other := range []string{".json", ".a.json", ".a.json.1.tmp", "c.txt"} {
		if err := os.WriteFile(filepath.Join(records.Dir, other), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if names, err := records.Names(); !slices.Equal(names, []string{"a", "b"}) || err != nil {
		t.Errorf("names %q, %v", names, err)
	}
	if r, err := records.Read("b"); err != nil || r.Says != "b" {
		t.Errorf("read %v, %v", r, err)
	}
	if err := os.WriteFile(records.File("b"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := records.Read("b"); err == nil || errors.Is(err, disk.ErrUnread) {
		t.Errorf("read what is no JSON: %v", err)
	}
	if err := errors.Join(records.Remove("b"), records.Remove("b")); err != nil || !records.Lacks("b") || records.Lacks("a") {
		t.Errorf("after b was removed: %v, a is missing: %v, b is missing: %v", err, records.Lacks("a"), records.Lacks("b"))
	}
	records.Files.FS = &disktest.Disk{BeforeRead: func(string) error { return syscall.EIO }}
	if _, err := records.Read("a"); !errors.Is(err, disk.ErrUnread) || !errors.Is(err, syscall.EIO) {
		t.Errorf("read from a disk that fails: %v", err)
	}
}
