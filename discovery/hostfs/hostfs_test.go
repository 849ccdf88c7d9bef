package hostfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"
)

// host creates a directory with files, links (by "->") and directories.
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
	root := host(t, map[string]string{"sys/a/b": "1", "sys/link": "->a", "proc/c": "2"})
	for _, f := range []fs.FS{open(t, root), newPlainFS(root)} {
		if err := fstest.TestFS(f, "sys/a/b", "sys/link", "proc/c"); err != nil {
			t.Errorf("%T: %v", f, err)
		}
	}
}

// Links are resolved on the host, regardless of the mount point of its root.
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

// Only regular files and directories are opened: opening a device node could have effects, and
// opening a FIFO would block.
func TestOpensFilesOnly(t *testing.T) {
	root := host(t, map[string]string{"sys/a": "1", "dev/link": "->fifo"})
	if err := unix.Mkfifo(filepath.Join(root, "dev/fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	special := []string{"dev/fifo", "dev/link"}
	null := filepath.Join(root, "sys/null") // an unexpected place for a node
	if err := unix.Mknod(null, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err == nil {
		special = append(special, "sys/null")
	} else if os.Geteuid() == 0 {
		t.Log("no device node can be made:", err)
	}
	plain := newPlainFS(root)
	for kind, f := range map[string]fs.FS{"openat2": open(t, root), "without openat2": plain} {
		for _, name := range special {
			if text, err := fs.ReadFile(f, name); !errors.Is(err, errNoFile) {
				t.Errorf("%s: %s: %q, %v; want that it is not opened", kind, name, text, err)
			}
			if info, err := fs.Stat(f, name); err != nil || info.Mode().IsRegular() {
				t.Errorf("%s: %s cannot be looked at: %v, %v", kind, name, info, err)
			}
		}
		if _, err := fs.ReadFile(f, "sys"); err == nil {
			t.Errorf("%s: a directory was read as a file", kind)
		}
		if text, err := fs.ReadFile(f, "sys/a"); string(text) != "1" || err != nil {
			t.Errorf("%s: a file: %q, %v", kind, text, err)
		}
	}
}

// In the kernel's own sysfs, files are read without checking each file's type.
func TestSysfs(t *testing.T) {
	f := open(t, "/").(*hostFS)
	if !f.sysfs {
		t.Skip("this machine has no sysfs")
	}
	if text, err := fs.ReadFile(f, "sys/kernel/uevent_seqnum"); err != nil || len(text) == 0 {
		t.Errorf("%q, %v", text, err)
	}
	if open(t, host(t, map[string]string{"sys/a": "1"})).(*hostFS).sysfs {
		t.Error("a directory is taken for sysfs")
	}
}

// A copy of /proc is not this machine's /proc, even with the same content.
func TestHasProc(t *testing.T) {
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Skip(err)
	}
	copied := host(t, map[string]string{"proc/sys/kernel/random/boot_id": string(bootID)})
	for name, test := range map[string]struct {
		host fs.FS
		want bool
	}{
		"this machine":                    {open(t, "/"), true},
		"this machine, without openat2":   {newPlainFS("/"), true},
		"with files over it":              {NewOverlay(open(t, "/")), true},
		"a copy":                          {open(t, copied), false},
		"a copy, without openat2":         {newPlainFS(copied), false},
		"a copy with files over it":       {NewOverlay(open(t, copied)), false},
		"in memory":                       {fstest.MapFS{}, false},
		"in memory, with files over that": {NewOverlay(fstest.MapFS{}), false},
	} {
		if got := HasProc(test.host); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// StatOpened returns the numbers of an open file, regardless of its name.
func TestStatOpened(t *testing.T) {
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	name := fmt.Sprintf("proc/self/fd/%d", null.Fd())
	for kind, f := range map[string]fs.FS{"openat2": open(t, "/"), "without openat2": newPlainFS("/")} {
		info, err := StatOpened(f, name)
		if err != nil {
			t.Fatal(err)
		}
		if stat := info.Sys().(*syscall.Stat_t); info.Mode().Type() != fs.ModeDevice|fs.ModeCharDevice || stat.Rdev != unix.Mkdev(1, 3) {
			t.Errorf("%s: %v, numbers %x", kind, info.Mode(), stat.Rdev)
		}
		if _, err := StatOpened(f, "proc/self/fd/999999"); err == nil {
			t.Errorf("%s: a file that is not open", kind)
		}
	}
}

func BenchmarkRead(b *testing.B) {
	f, err := Open("/")
	if err != nil {
		b.Fatal(err)
	}
	for _, name := range []string{"sys/kernel/uevent_seqnum", "proc/version"} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := fs.ReadFile(f, name); err != nil {
					b.Skip(err)
				}
			}
		})
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
	root := host(t, map[string]string{"dev/file": "1", "dev/out": "->/etc/passwd"})
	f := open(t, root)
	if _, err := OpenDevice(f, "dev/file", 1, 3); err == nil || !strings.Contains(err.Error(), "not the character device 1:3") {
		t.Errorf("a file: %v", err)
	}
	if _, err := OpenDevice(f, "dev/out", 1, 3); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link out of the host: %v; want that it leads nowhere", err)
	}
	if _, err := OpenDevice(os.DirFS(root), "dev/null", 1, 3); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("of another file system: %v", err)
	}
	machine := open(t, "/")
	if _, err := OpenDevice(machine, "dev/null", 10, 130); err == nil || !strings.Contains(err.Error(), "not the character device 10:130") {
		t.Errorf("a device of other numbers: %v", err)
	}
	if _, err := OpenDisk(machine, "dev/null", 1, 3, true); err == nil || !strings.Contains(err.Error(), "not the block device 1:3") {
		t.Errorf("a character device as a disk: %v", err)
	}
	null, err := OpenDevice(NewOverlay(machine), "dev/null", 1, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if _, err := null.WriteString("2"); err != nil {
		t.Errorf("not open for writing: %v", err)
	}
}
