package disk

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"

	"chandler.dev/internal/disk"
)

// outcomes returns what a file may hold after many losses of power, "-" where it
// is missing.
func outcomes(t *testing.T, prepare func(files, unsynced disk.Files)) map[string]bool {
	t.Helper()
	seen := make(map[string]bool)
	for seed := range uint64(200) {
		d := New(nil)
		prepare(disk.Files{FS: d.View(nil)}, disk.Files{FS: d.View(nil), Unsynced: true})
		d.LosePower(rand.New(rand.NewPCG(seed, 0)), "/run")
		data, there := d.Content("/d/f")
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

func TestWhatIsSynchronisedSurvives(t *testing.T) {
	for got := range outcomes(t, func(files, _ disk.Files) { write(t, files, "one"); write(t, files, "two") }) {
		if got != "two" {
			t.Errorf("after a loss of power the file holds %q", got)
		}
	}
}

func TestWhatIsNotSynchronisedIsLost(t *testing.T) {
	got := outcomes(t, func(files, unsynced disk.Files) { write(t, files, "one"); write(t, unsynced, "two") })
	for _, want := range []string{"one", "two", "", "\x00\x00\x00"} {
		if !got[want] {
			t.Errorf("after a loss of power the file never holds %q, but %v", want, got)
		}
	}
	got = outcomes(t, func(files, _ disk.Files) {
		write(t, files, "one")
		if err := (disk.Files{FS: files.FS, Unsynced: true}).Remove("/d/f"); err != nil {
			t.Fatal(err)
		}
	})
	if !got["one"] || !got["-"] {
		t.Errorf("after a removal that was not synchronised: %v", got)
	}
}

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
	if data, _ := d.Content("/d/f"); string(data) != "one" {
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
	if data, _ := d.Content("/d/f"); string(data) != "one" {
		t.Errorf("it left %q", data)
	}
}

func TestDamage(t *testing.T) {
	d := New(nil)
	write(t, disk.Files{FS: d.View(nil)}, "one")
	if !d.Damage("/d/f", func([]byte) []byte { return nil }) || d.Damage("/d/g", func([]byte) []byte { return nil }) {
		t.Error("Damage does not say which files there are")
	}
	if data, there := d.Content("/d/f"); len(data) > 0 || !there {
		t.Errorf("the file holds %q", data)
	}
	d.Wipe("/d")
	if got := d.Files("/"); len(got) > 0 {
		t.Errorf("after Wipe there are %q", got)
	}
}
