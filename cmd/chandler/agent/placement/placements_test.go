package placement

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/cmd/chandler/agent/statefile"
	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
)

// The placements survive a restart.
func TestPlacementsSurviveRestart(t *testing.T) {
	dir := t.TempDir()
	want := map[string]discovery.Mode{"gpu": dra, "nic": classic}
	loadPlacements(t.Context(), disk.Files{}, dir).set(t.Context(), placementOf(want))
	if got := loadPlacements(t.Context(), disk.Files{}, dir).api; !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func placementOf(api map[string]discovery.Mode) *Placement {
	return &Placement{API: maps.Clone(api), Moving: make(map[string]string), To: make(map[string]discovery.Mode)}
}

// After a failed write a physical device stays with the API of the file, and is withheld. A new
// physical device is offered. Placements are written again after a failed write, and after their file
// was removed.
func TestPlacementsAreWrittenAgain(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "sides.json")
	if err := os.WriteFile(file, []byte(`{"gpu":"DevicePlugin"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	full := &disktest.Disk{}
	p := loadPlacements(t.Context(), disk.Files{FS: full}, dir)
	want := map[string]discovery.Mode{"gpu": dra, "new": dra}
	full.Before = func(disktest.Op, string) error { return syscall.ENOSPC }
	held := placementOf(want)
	p.set(t.Context(), held)
	if held.API["gpu"] != classic || held.To["gpu"] != dra || !strings.Contains(held.Moving["gpu"], file) || held.API["new"] != dra || held.Moving["new"] != "" {
		t.Errorf("after a failed write: %+v", held)
	}
	full.Before = nil
	for _, when := range []string{"after a failed write", "after the file was removed"} {
		p.set(t.Context(), placementOf(want))
		if got := loadPlacements(t.Context(), disk.Files{}, dir).api; !maps.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", when, got, want)
		}
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
}

// A damaged file of placements is kept beside the new file.
func TestPlacementsThatAreDamaged(t *testing.T) {
	for name, text := range map[string]string{"no JSON": `{"gpu":"Dev`, "empty": "", "no API": `{"gpu":"Classic"}`} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "sides.json")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			p := loadPlacements(t.Context(), disk.Files{}, dir)
			if len(p.api) > 0 {
				t.Errorf("got %v", p.api)
			}
			p.set(t.Context(), placementOf(map[string]discovery.Mode{"gpu": dra}))
			if kept, err := os.ReadFile(file + ".unreadable"); err != nil || string(kept) != text {
				t.Errorf("kept %q, %v", kept, err)
			}
			if again := loadPlacements(t.Context(), disk.Files{}, dir); again.api["gpu"] != dra {
				t.Errorf("then %v", again.api)
			}
		})
	}
}

// A file of placements that is temporarily unreadable is read again, and not written meanwhile.
func TestPlacementsThatCannotBeReadForTheMoment(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "sides.json")
	if err := os.Mkdir(file, 0o700); err != nil { // reading a directory returns EISDIR
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		loaded := make(chan *placements)
		go func() { loaded <- loadPlacements(context.Background(), disk.Files{}, dir) }()
		time.Sleep(statefile.ReadLimit / 2)
		synctest.Wait()
		if err := os.Remove(file); err != nil {
			t.Error(err)
		}
		if err := os.WriteFile(file, []byte(`{"gpu":"DevicePlugin"}`), 0o600); err != nil {
			t.Error(err)
		}
		if p := <-loaded; p.api["gpu"] != classic {
			t.Errorf("got %+v", p)
		}
	})
}

// A file of placements that can be neither read nor renamed is not overwritten, and the agent works
// without the file.
func TestPlacementsThatCannotBeSetAside(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "sides.json")
	if err := os.MkdirAll(filepath.Join(file+".unreadable", "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := loadPlacements(t.Context(), disk.Files{}, dir)
	p.set(t.Context(), placementOf(map[string]discovery.Mode{"gpu": dra}))
	if p.api["gpu"] != dra {
		t.Errorf("the agent does not go on: %v", p.api)
	}
	if kept, err := os.ReadFile(file); err != nil || string(kept) != "{" {
		t.Errorf("written over: %q, %v", kept, err)
	}
}
