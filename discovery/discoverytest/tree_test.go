package discoverytest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery/hostfs"
)

func TestTree(t *testing.T) {
	tree := readTree(t, t.TempDir()).WithFile("sys/a/b", []byte("1")).WithLink("sys/link", "a").WithFile("proc/c", []byte("2")).WithDirectory("sys/empty")
	if err := fstest.TestFS(tree, "sys/a/b", "sys/link", "proc/c", "sys/empty"); err != nil {
		t.Error(err)
	}
	changed := tree.WithoutFile("sys/a").WithFile("proc/c", []byte("3")).WithFile("sys/link/x", []byte("4"))
	want := []string{"proc/c", "sys/link/x"}
	if got := changed.Files(); !slices.Equal(got, want) {
		t.Errorf("files of the changed tree are %v, want %v", got, want)
	}
	want = []string{"proc/c", "sys/a/b", "sys/link"}
	if got := tree.Files(); !slices.Equal(got, want) {
		t.Errorf("the tree was changed: files are %v, want %v", got, want)
	}
	if text, err := fs.ReadFile(tree, "proc/c"); err != nil || string(text) != "2" {
		t.Errorf("the tree was changed: proc/c is %q, %v", text, err)
	}
}

func TestFilesRead(t *testing.T) {
	tree := (&Tree{root: newDirectory(".", fs.ModeDir, nil)}).WithFile("a/read", nil).WithFile("a/not", nil).WithFile("b/1", nil).WithFile("b/2", nil).
		WithFile("c/1", nil).WithLink("to/a", "../a").WithLink("to/b", "../b").WithFile("d/asked", nil).WithLink("d/link", "asked").WithFile("e/under", nil)
	got := tree.FilesRead(func(fsys fs.FS) {
		_, _ = fs.ReadFile(fsys, "to/a/read")
		_, _ = fs.ReadDir(fsys, "b")
		_, _ = fs.ReadLink(fsys, "d/link")
		_, _ = fs.Stat(fsys, "e")
		c, _ := fsys.Open("c")
		_, _ = c.(fs.ReadDirFile).ReadDir(-1)
	})
	if want := []string{"a/read", "b/1", "b/2", "c/1", "d/link", "to/a"}; !slices.Equal(got, want) {
		t.Errorf("looked at %v, want %v", got, want)
	}
}

func readTree(t *testing.T, dir string) *Tree {
	t.Helper()
	fsys, err := hostfs.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	tree, err := ReadTree(fsys)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// A tree returns the same results as the directory from which it was read.
func TestTreeIsTheHost(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"sys/devices/pci/0/drm", "sys/class", "dev", "empty"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{"sys/devices/pci/0/vendor": "0x1002\n", "dev/kvm": "", "empty/file": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	links := map[string]string{
		"sys/class/card": "../devices/pci/0/drm", "sys/class/abs": "/sys/devices/pci/0", "sys/class/out": "../../../../dev",
		"sys/class/loop": "loop", "sys/class/loop1": "loop2/x", "sys/class/loop2": "loop1", "sys/class/none": "nowhere/at/all",
		"sys/class/file": "../devices/pci/0/vendor", "sys/class/twice": "file", "sys/class/below": "file/x", "sys/class/slash": "abs/", "root": "/", "up": "..",
		"sys/class/fileslash": "file/",
	}
	names := []string{".", "sys", "sys/devices/pci/0/vendor", "sys/devices/pci/0/vendor/x", "dev/kvm", "empty", "empty/file", "no", "no/no", "../x", "/sys", "sys/", ""}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		for _, below := range []string{"", "/vendor", "/drm", "/kvm", "/x", "/sys/class/abs/vendor", "/up/up/dev"} {
			names = append(names, name+below)
		}
	}
	onDisk, err := hostfs.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	tree := readTree(t, dir)
	for _, name := range names {
		for what, ask := range map[string]func(fs.FS, string) (string, error){
			"read": func(f fs.FS, name string) (string, error) {
				text, err := fs.ReadFile(f, name)
				return string(text), err
			},
			"list": func(f fs.FS, name string) (text string, err error) {
				entries, err := fs.ReadDir(f, name)
				for _, e := range entries {
					text += fmt.Sprintln(e.Name(), e.Type(), e.IsDir())
				}
				return text, err
			},
			"readlink": fs.ReadLink,
			"stat":     func(f fs.FS, name string) (string, error) { return describe(fs.Stat(f, name)) },
			"lstat":    func(f fs.FS, name string) (string, error) { return describe(fs.Lstat(f, name)) },
		} {
			want, wantErr := ask(onDisk, name)
			got, gotErr := ask(tree, name)
			if got != want || !errors.Is(cause(gotErr), cause(wantErr)) {
				t.Errorf("%s %q: %q, %v; on disk it is %q, %v", what, name, got, gotErr, want, wantErr)
			}
		}
	}
}

func describe(info fs.FileInfo, err error) (string, error) {
	if err != nil {
		return "", err
	}
	return fmt.Sprint(info.Name(), info.Mode().Type(), info.IsDir()), nil
}

// cause returns the kernel's error.
func cause(err error) error {
	if number := syscall.Errno(0); errors.As(err, &number) {
		if errors.Is(err, syscall.EINVAL) {
			return fs.ErrInvalid
		}
		return number
	}
	if errors.Is(err, fs.ErrInvalid) {
		return fs.ErrInvalid
	}
	return err
}
