package hostfile_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/hostfile"
)

// newWriter returns a Writer for the directory /run/x, and the path of the directory.
func newWriter(t *testing.T) (hostfile.Writer, string) {
	t.Helper()
	w := hostfile.Writer{Root: t.TempDir(), Dirs: []string{"/run/x", "/run/absent"}}
	dir := filepath.Join(w.Root, "run/x")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return w, dir
}

func mustWrite(t *testing.T, w hostfile.Writer, files ...discovery.HostFile) {
	t.Helper()
	if unwritten, err := w.Write(files); err != nil || len(unwritten) > 0 {
		t.Fatalf("write: %v, unwritten %q", err, unwritten)
	}
}

func check(t *testing.T, name, want string) {
	t.Helper()
	info, err := os.Lstat(name)
	if err != nil || info.Mode() != 0o444 {
		t.Fatalf("%v, %v; want a file of mode 0444", info, err)
	}
	if text, _ := os.ReadFile(name); string(text) != want {
		t.Errorf("%s: %q; want %q", name, text, want)
	}
}

func TestWrite(t *testing.T) {
	w, dir := newWriter(t)
	name := filepath.Join(dir, "a.json")
	mustWrite(t, w, discovery.HostFile{Path: "/run/x/a.json", Text: "one"})
	check(t, name, "one")
	mustWrite(t, w, discovery.HostFile{Path: "/run/x/a.json", Text: "two"})
	check(t, name, "two")

	// A correct file is not written again.
	w.Files.FS = &disktest.Disk{Before: func(op disktest.Op, _ string) error { return errors.New(string(op)) }}
	mustWrite(t, w, discovery.HostFile{Path: "/run/x/a.json", Text: "two"})
	if _, err := w.Write([]discovery.HostFile{{Path: "/run/x/a.json", Text: "three"}}); err == nil {
		t.Error("no error, and nothing written")
	}
	check(t, name, "two")
}

// A link in place of the file is replaced, and the link's target remains unchanged.
func TestWriteFollowsNoLink(t *testing.T) {
	w, dir := newWriter(t)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := errors.Join(os.WriteFile(secret, []byte("secret"), 0o444), os.Symlink(secret, filepath.Join(dir, "a.json"))); err != nil {
		t.Fatal(err)
	}
	mustWrite(t, w, discovery.HostFile{Path: "/run/x/a.json", Text: "secret"})
	check(t, filepath.Join(dir, "a.json"), "secret")
	mustWrite(t, w, discovery.HostFile{Path: "/run/x/a.json", Text: "new"})
	check(t, secret, "secret")
}

func TestWriteOnlyWhereItMay(t *testing.T) {
	w, dir := newWriter(t)
	for _, path := range []string{"/run/y/a", "/run/x/../y/a", "/run/x/.a", "/run/a"} {
		if _, err := w.Write([]discovery.HostFile{{Path: path, Text: "x"}, {Path: "/run/x/good", Text: "x"}}); err == nil {
			t.Errorf("%s: no error", path)
		}
	}
	check(t, filepath.Join(dir, "good"), "x")
	outside := filepath.Join(w.Root, "run", "a")
	if err := os.WriteFile(outside, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := w.Remove([]string{"/run/a", "/run/x/../a"}); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(outside); err != nil {
		t.Errorf("removed what is in no directory of ours: %v", err)
	}
}

func TestUnreadDirectory(t *testing.T) {
	w, dir := newWriter(t)
	unwritten, err := w.Write([]discovery.HostFile{{Path: "/run/absent/a", Text: "x"}, {Path: "/run/x/b", Text: "x"}})
	if err != nil || !slices.Equal(unwritten, []string{"/run/absent/a"}) {
		t.Errorf("%v, unwritten %q", err, unwritten)
	}
	if _, err := os.Stat(filepath.Join(w.Root, "run/absent")); !errors.Is(err, os.ErrNotExist) {
		t.Error("the directory was made")
	}
	check(t, filepath.Join(dir, "b"), "x")
	if err := w.Remove([]string{"/run/absent/a"}); err != nil {
		t.Error(err)
	}
}

func TestRemove(t *testing.T) {
	w, dir := newWriter(t)
	for _, name := range []string{"a", ".a.12.tmp", ".other.12.tmp", "other"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Remove([]string{"/run/x/a", "/run/x/missing"}); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 2 || left[0].Name() != ".other.12.tmp" || left[1].Name() != "other" {
		t.Errorf("%v: left %v", err, left)
	}
}
