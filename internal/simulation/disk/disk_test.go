package disk

import (
	"errors"
	"io/fs"
	"maps"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"

	"chandler.dev/internal/disk"
)

// outcomes returns the possible contents of a file after many power failures, "-" for a missing
// file.
func outcomes(t *testing.T, prepare func(synced, unsynced disk.Files)) map[string]bool {
	t.Helper()
	seen := make(map[string]bool)
	for seed := range uint64(200) {
		d := New(nil, "/d")
		prepare(disk.Files{FS: d.View(nil), Synced: true}, disk.Files{FS: d.View(nil)})
		d.LosePower(rand.New(rand.NewPCG(seed, 0)), "/run")
		data, there := d.FileContent("/d/f")
		if !there {
			data = []byte("-")
		}
		seen[string(data)] = true
	}
	return seen
}

func write(t *testing.T, files disk.Files, text string) {
	t.Helper()
	if _, err := files.Write("/d/f", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, files disk.Files) {
	t.Helper()
	if err := files.RemoveAll("/d"); err != nil {
		t.Fatal(err)
	}
}

func TestWhatIsSynchronisedSurvives(t *testing.T) {
	for got := range outcomes(t, func(synced, _ disk.Files) { write(t, synced, "one"); write(t, synced, "two") }) {
		if got != "two" {
			t.Errorf("after a loss of power the file holds %q", got)
		}
	}
}

func TestWhatIsNotSynchronisedIsLost(t *testing.T) {
	sync := func(t *testing.T, of disk.FS, name string) {
		if err := of.SyncDir(name); err != nil {
			t.Fatal(err)
		}
	}
	for what, c := range map[string]struct {
		prepare func(synced, unsynced disk.Files)
		want    []string
	}{
		"a file in place of a synchronised one": {func(synced, unsynced disk.Files) {
			write(t, synced, "one")
			write(t, unsynced, "two")
		}, []string{"", "\x00\x00\x00", "one", "t", "tw", "two"}},
		"a file of a name that is synchronised": {func(synced, unsynced disk.Files) {
			write(t, synced, "one")
			write(t, unsynced, "two")
			sync(t, synced.FS, "/d")
		}, []string{"", "\x00\x00\x00", "t", "tw", "two"}},
		"a name": {func(synced, unsynced disk.Files) {
			write(t, synced, "one")
			if _, err := (disk.Files{FS: namesLast{synced.FS}, Synced: true}).Write("/d/f", []byte("two"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, []string{"one", "two"}},
		"a removal": {func(synced, unsynced disk.Files) {
			write(t, synced, "one")
			if err := unsynced.Remove("/d/f"); err != nil {
				t.Fatal(err)
			}
		}, []string{"-", "one"}},
		"a directory": {func(synced, unsynced disk.Files) {
			remove(t, unsynced)
			sync(t, unsynced.FS, "/")
			write(t, synced, "two")
		}, []string{"-", "two"}},
		"the removal of a directory": {func(synced, unsynced disk.Files) {
			write(t, synced, "one")
			remove(t, unsynced)
		}, []string{"-", "one"}},
		"a directory in place of a removed one": {func(synced, unsynced disk.Files) {
			write(t, synced, "one")
			remove(t, unsynced)
			write(t, synced, "two")
		}, []string{"-", "one", "two"}},
		"nothing, once the directory above is synchronised": {func(synced, unsynced disk.Files) {
			write(t, synced, "one")
			remove(t, unsynced)
			write(t, synced, "two")
			sync(t, unsynced.FS, "/")
		}, []string{"two"}},
	} {
		if got := slices.Sorted(maps.Keys(outcomes(t, c.prepare))); !slices.Equal(got, c.want) {
			t.Errorf("%s: after a loss of power the file may hold %q, and should %q", what, got, c.want)
		}
	}
}

// namesLast synchronizes no directory.
type namesLast struct{ disk.FS }

func (namesLast) SyncDir(string) error { return nil }

func TestVolatileDirectories(t *testing.T) {
	d := New(nil)
	files := disk.Files{FS: d.View(nil)}
	for _, name := range []string{"/run/a/f", "/runs/f"} {
		if _, err := files.Write(name, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d.Reboot("/run")
	if got := d.Files("/"); !slices.Equal(got, []string{"/runs/f"}) {
		t.Errorf("after a reboot there are %q", got)
	}
}

func TestFaults(t *testing.T) {
	d := New(nil)
	files := disk.Files{FS: d.View(nil)}
	write(t, files, "one")
	d.SetFault(func(op Op, _ string) error {
		if op == Write {
			return syscall.ENOSPC
		}
		return nil
	})
	if in, err := files.Write("/d/f", []byte("two"), 0o600); !errors.Is(err, syscall.ENOSPC) || in != disk.Old {
		t.Errorf("a write to a full disk: %v, %v", in, err)
	}
	d.SetFault(nil)
	if data, _ := d.FileContent("/d/f"); string(data) != "one" {
		t.Errorf("it left %q", data)
	}
	if got := d.Files("/d"); len(got) != 1 {
		t.Errorf("it left %q", got)
	}
	if _, err := files.Read("/d/g"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

func TestGate(t *testing.T) {
	d := New(nil)
	write(t, disk.Files{FS: d.View(nil)}, "one")
	dead := disk.Files{FS: d.View(func(Op, string) error { return ErrDead })}
	if _, err := dead.Write("/d/f", []byte("two"), 0o600); !errors.Is(err, ErrDead) {
		t.Errorf("a write of a killed process: %v", err)
	}
	if data, _ := d.FileContent("/d/f"); string(data) != "one" {
		t.Errorf("it left %q", data)
	}
}

func TestDamage(t *testing.T) {
	d := New(nil)
	write(t, disk.Files{FS: d.View(nil)}, "one")
	if !d.DamageFile("/d/f", func([]byte) []byte { return nil }) || d.DamageFile("/d/g", func([]byte) []byte { return nil }) {
		t.Error("Damage does not say which files there are")
	}
	if data, there := d.FileContent("/d/f"); len(data) > 0 || !there {
		t.Errorf("the file holds %q", data)
	}
	d.WipeDir("/d")
	if got := d.Files("/"); len(got) > 0 {
		t.Errorf("after Wipe there are %q", got)
	}
}
