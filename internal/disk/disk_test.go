package disk_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
)

// Synced files are synced before the call returns. Other files are not, but are replaced
// atomically as well.
func TestSynced(t *testing.T) {
	for synced, want := range map[bool][]disktest.Op{
		true:  {disktest.Create, disktest.Write, disktest.Sync, disktest.Rename, disktest.SyncDir, disktest.Remove},
		false: {disktest.Create, disktest.Write, disktest.Rename, disktest.Remove},
	} {
		var got []disktest.Op
		files := disk.Files{Synced: synced, FS: &disktest.Disk{Before: func(op disktest.Op, _ string) error {
			got = append(got, op)
			return nil
		}}}
		name := filepath.Join(t.TempDir(), "one", "new", "file")
		if there, err := files.Write(name, []byte("text"), 0o644); err != nil || there != disk.New {
			t.Fatal(there, err)
		}
		if data, err := os.ReadFile(name); err != nil || string(data) != "text" {
			t.Errorf("the file has %q, %v", data, err)
		}
		if err := files.Remove(name); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("synced %v: %q, want %q", synced, got, want)
		}
	}
}

// A write that fails at any step returns the file in place, so the caller can determine
// whether the data was stored.
func TestFailedWriteSaysWhichFileIsInPlace(t *testing.T) {
	for step, want := range map[disktest.Op]disk.InPlace{
		disktest.Create:  disk.Old,
		disktest.Write:   disk.Old,
		disktest.Sync:    disk.Old,
		disktest.Rename:  disk.Old,
		disktest.SyncDir: disk.New,
	} {
		for _, before := range []string{"", "old"} {
			dir := t.TempDir()
			name := filepath.Join(dir, "file")
			if before != "" {
				if err := os.WriteFile(name, []byte(before), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			faulty := &disktest.Disk{Before: func(op disktest.Op, at string) error {
				if op == step {
					return syscall.ENOSPC
				}
				return nil
			}}
			got, err := disk.Files{FS: faulty, Synced: true}.Write(name, []byte("new"), 0o600)
			if !errors.Is(err, syscall.ENOSPC) || got != want {
				t.Errorf("%s fails: %s is in place, %v; want %s and no space", step, got, err, want)
			}
			content := map[disk.InPlace]string{disk.Old: before, disk.New: "new"}[want]
			if data, _ := os.ReadFile(name); string(data) != content {
				t.Errorf("%s fails: the file has %q, want %q", step, data, content)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
				t.Errorf("%s fails: left behind: %q", step, left)
			}
		}
	}
}

// If reading back fails as well, the file in place is unknown.
func TestFailedWriteOfAnUnreadableFile(t *testing.T) {
	faulty := &disktest.Disk{
		Before: func(op disktest.Op, _ string) error {
			if op == disktest.SyncDir {
				return syscall.EIO
			}
			return nil
		},
		BeforeRead: func(string) error { return syscall.EIO },
	}
	got, err := disk.Files{FS: faulty, Synced: true}.Write(filepath.Join(t.TempDir(), "file"), []byte("new"), 0o600)
	if got != disk.Unknown || !errors.Is(err, syscall.EIO) {
		t.Errorf("%s is in place, %v", got, err)
	}
}

func TestNameThatNoFileCanHaveIsMissing(t *testing.T) {
	name := filepath.Join(t.TempDir(), strings.Repeat("n", 256))
	if err := (disk.Files{}).Remove(name); err != nil {
		t.Error(err)
	}
	if err := (disk.Files{}).RemoveAll(name); err != nil {
		t.Error(err)
	}
	if there, err := (disk.Files{}).Write(name, nil, 0o600); err == nil || there != disk.Old {
		t.Errorf("written: %s is in place, %v", there, err)
	}
}

func TestSweep(t *testing.T) {
	dir := t.TempDir()
	keep := []string{"file.json", ".other.json.1.tmp", ".hidden", "mode", ".writable-x", ".mode.d.tmp"}
	gone := []string{".file.json.12.tmp", ".mode.1.tmp", ".writable-123", ".chandler-45", ".chandler.6.tmp"}
	for _, name := range slices.Concat(keep[:5], gone) {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, keep[5]), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := (disk.Files{}).SweepTemporary(dir, disk.Abandoned, "file.json.", "mode."); err != nil {
		t.Fatal(err)
	}
	for _, name := range gone {
		if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
			t.Errorf("a process may be writing it: %v", err)
		}
	}
	if err := (disk.Files{}).SweepTemporary(dir, 0, "file.json.", "mode."); err != nil {
		t.Fatal(err)
	}
	for _, name := range keep {
		if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	for _, name := range gone {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there: %v", name, err)
		}
	}
	if err := (disk.Files{}).SweepTemporary(filepath.Join(dir, "missing"), 0, ""); err != nil {
		t.Error(err)
	}
}

func TestWritable(t *testing.T) {
	dir := t.TempDir()
	if err := (disk.Files{}).CheckWritable(dir); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if err := (disk.Files{}).CheckWritable(filepath.Join(dir, "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory that is missing: %v", err)
	}
}

// An unchanged file is not written again, and nil data removes the file.
func TestKeep(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	var before os.FileInfo
	for _, step := range []struct {
		data string
		same bool
	}{{"one", false}, {"one", true}, {"two", false}} {
		if err := (disk.Files{}).UpdateFile(file, []byte(step.data), 0o600); err != nil {
			t.Fatal(err)
		}
		now, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		if same := before != nil && os.SameFile(before, now); same != step.same {
			t.Errorf("%s: the file is the same: %v", step.data, same)
		}
		before = now
	}
	for range 2 {
		if err := (disk.Files{}).UpdateFile(file, nil, 0o600); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("it is still there: %v", err)
	}
}
