package hostfs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"
)

// host makes a directory with files, links (by "->") and directories.
func host(t *testing.T, entries map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range entries {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if len(text) > 2 && text[:2] == "->" {
			err = os.Symlink(text[2:], path)
		} else {
			err = os.WriteFile(path, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func open(t *testing.T, root string) fs.FS {
	t.Helper()
	f, err := Open(root)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestFS(t *testing.T) {
	f := open(t, host(t, map[string]string{"sys/a/b": "1", "sys/link": "->a", "proc/c": "2"}))
	if err := fstest.TestFS(f, "sys/a/b", "sys/link", "proc/c"); err != nil {
		t.Error(err)
	}
}

// Links mean what they mean on the host, wherever its root is here.
func TestLinksStayInTheHost(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(outside, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	f := open(t, host(t, map[string]string{
		"sys/real":     "yours",
		"sys/absolute": "->/sys/real",
		"sys/escaping": "->../../../../../../../../.." + outside,
		"sys/outside":  "->" + outside,
		"sys/loop":     "->loop",
	}))
	if text, err := fs.ReadFile(f, "sys/absolute"); err != nil || string(text) != "yours" {
		t.Errorf("absolute link: %q, %v; want the host's file", text, err)
	}
	for _, name := range []string{"sys/escaping", "sys/outside"} {
		if text, err := fs.ReadFile(f, name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %q, %v; want that it leads nowhere", name, text, err)
		}
	}
	if _, err := fs.ReadFile(f, "sys/loop"); err == nil {
		t.Error("a link to itself was read")
	}
	if target, err := fs.ReadLink(f, "sys/outside"); err != nil || target != outside {
		t.Errorf("text of a link: %q, %v; want %q", target, err, outside)
	}
}

// What is no file does not keep its reader waiting.
func TestNothingWaits(t *testing.T) {
	root := host(t, map[string]string{"sys/a": "1"})
	if err := unix.Mkfifo(filepath.Join(root, "sys/fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	f := open(t, root)
	if text, err := fs.ReadFile(f, "sys/fifo"); err != nil || len(text) > 0 {
		t.Errorf("FIFO: %q, %v; want that it is empty", text, err)
	}
	if _, err := fs.ReadFile(f, "sys"); err == nil {
		t.Error("a directory was read as a file")
	}
}

func TestOpenNamesTheDirectory(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{missing, file} {
		var pathError *fs.PathError
		if _, err := Open(dir); !errors.As(err, &pathError) || pathError.Path != dir {
			t.Errorf("error %v does not name %s", err, dir)
		}
	}
}

func TestOpenDevice(t *testing.T) {
	root := host(t, map[string]string{"dev/node": "1", "dev/out": "->/etc/passwd"})
	f := open(t, root)
	node, err := OpenDevice(f, "dev/node")
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	if _, err := node.WriteString("2"); err != nil {
		t.Errorf("not open for writing: %v", err)
	}
	if _, err := OpenDevice(f, "dev/out"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link out of the host: %v; want that it leads nowhere", err)
	}
	if _, err := OpenDevice(os.DirFS(root), "dev/node"); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("of another file system: %v", err)
	}
}
