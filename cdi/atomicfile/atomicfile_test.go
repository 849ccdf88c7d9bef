package atomicfile

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// What may be lost with the power is not waited for, and replaced at once all
// the same.
func TestUnsynced(t *testing.T) {
	for unsynced, want := range map[bool][]Op{
		false: {Create, Write, Sync, Rename, SyncDir, Remove, SyncDir},
		true:  {Create, Write, Rename, Remove},
	} {
		var got []Op
		files := Files{Unsynced: unsynced, Before: func(op Op, _ string) error {
			got = append(got, op)
			return nil
		}}
		name := filepath.Join(t.TempDir(), "new", "file")
		if err := files.Write(name, []byte("text"), 0o644); err != nil {
			t.Fatal(err)
		}
		if data, err := os.ReadFile(name); err != nil || string(data) != "text" {
			t.Errorf("the file has %q, %v", data, err)
		}
		if err := files.Remove(name); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("unsynced %v: %q, want %q", unsynced, got, want)
		}
	}
}
