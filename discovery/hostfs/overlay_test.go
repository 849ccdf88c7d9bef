package hostfs

import (
	"errors"
	"io/fs"
	"testing"
	"testing/fstest"
)

func read(f fs.FS, name string) string {
	data, err := fs.ReadFile(f, name)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// A file of the overlay is visible to every method. All other files are unchanged.
func TestOverlay(t *testing.T) {
	o := NewOverlay(open(t, host(t, map[string]string{"sys/a": "1", "sys/link": "->a", "run/b": "on disk"})))
	if !o.Set("run/b", []byte("in memory")) || !o.Set("run/deep/c", []byte{}) {
		t.Error("new files change nothing")
	}
	if o.Set("run/b", []byte("in memory")) {
		t.Error("the same file is a change")
	}
	if got := read(o, "run/b"); got != "in memory" {
		t.Errorf("in place of a file: %q", got)
	}
	if got := read(o, "run/deep/c"); got != "" {
		t.Errorf("empty file, where there is no directory: %q", got)
	}
	if info, err := fs.Stat(o, "run/b"); err != nil || info.Size() != 9 || !info.Mode().IsRegular() || info.Name() != "b" {
		t.Errorf("stat: %+v, %v", info, err)
	}
	if info, err := fs.Lstat(o, "run/deep/c"); err != nil || !info.Mode().IsRegular() {
		t.Errorf("lstat: %+v, %v", info, err)
	}
	if _, err := fs.ReadLink(o, "run/b"); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("read as a link: %v", err)
	}
	if !o.Set("run/b", nil) || o.Set("run/b", nil) || read(o, "run/b") != "on disk" {
		t.Error("a file that was taken away is not the one below it")
	}
	o.Set("run/deep/c", nil)
	if err := fstest.TestFS(o, "sys/a", "sys/link", "run/b"); err != nil {
		t.Error(err)
	}
	if target, err := fs.ReadLink(o, "sys/link"); err != nil || target != "a" {
		t.Errorf("link: %q, %v", target, err)
	}
}
