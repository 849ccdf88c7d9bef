package hook

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// newContainer returns a container with files, and its root. A value "-> x" is a link to x, and a
// name that ends in a slash is a directory.
func newContainer(t *testing.T, files map[string]string) (*Container, string) {
	t.Helper()
	root := filepath.Join(t.TempDir(), "rootfs")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		file := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(file), 0o755)
		target, isLink := strings.CutPrefix(content, "-> ")
		switch {
		case strings.HasSuffix(name, "/"):
			err = errors.Join(err, os.MkdirAll(file, 0o755))
		case isLink:
			err = errors.Join(err, os.Symlink(target, file))
		default:
			err = errors.Join(err, os.WriteFile(file, []byte(content), 0o600))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	c, err := In(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, root
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestStateOfContainer(t *testing.T) {
	bundle := t.TempDir()
	for _, dir := range []string{"rootfs", "elsewhere"} {
		if err := os.WriteFile(mustMkdir(t, filepath.Join(bundle, dir))+"/name", []byte(dir), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	state, err := json.Marshal(map[string]string{"ociVersion": "1.0.2", "id": "x", "bundle": bundle})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ config, state, want, fails string }{
		{config: `{"root":{"path":"rootfs"}}`, want: "rootfs"},
		{config: `{"root":{"path":"` + bundle + `/elsewhere"}}`, want: "elsewhere"},
		{config: `{"root":{"path":"/"}}`, fails: "the container's root is the host's"},
		{config: `{}`, fails: "it names no root"},
		{config: `{"root":{"path":"missing"}}`, fails: "container's root: "},
		{config: `{`, fails: "config.json: "},
		{state: `{}`, fails: "it names no bundle"},
		{state: ``, fails: "standard input: EOF"},
	} {
		if err := os.WriteFile(bundle+"/config.json", []byte(test.config), 0o600); err != nil {
			t.Fatal(err)
		}
		if test.config != "" {
			test.state = string(state)
		}
		c, err := ReadContainer(strings.NewReader(test.state))
		if test.fails != "" {
			if err == nil || !strings.Contains(err.Error(), test.fails) {
				t.Errorf("config %s, state %s: error %v; want one with %q", test.config, test.state, err, test.fails)
			}
			continue
		}
		if err != nil {
			t.Errorf("config %s: %v", test.config, err)
			continue
		}
		name, err := c.Read("/name", 100)
		if c.Close(); err != nil || string(name) != test.want {
			t.Errorf("config %s: root %q, %v; want %q", test.config, name, err, test.want)
		}
	}
}

func mustMkdir(t *testing.T, dir string) string {
	t.Helper()
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Whatever links an image has, no file outside the container is read or written.
func TestHostileLinks(t *testing.T) {
	outside := t.TempDir()
	if err := os.WriteFile(outside+"/ld.so.conf", []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	up := strings.Repeat("../", 20) + outside
	for name, files := range map[string]map[string]string{
		"absolute directory":     {"etc": "-> " + outside},
		"relative directory":     {"etc": "-> " + up},
		"absolute file":          {"etc/ld.so.conf": "-> " + outside + "/ld.so.conf", "etc/ld.so.cache": "-> " + outside + "/ld.so.cache"},
		"directory of libraries": {"usr/lib64": "-> " + outside},
		"through /proc":          {"etc": "-> /proc/self/root" + outside, "proc/self/root": "-> /"},
		"of the configuration":   {"etc/ld.so.conf.d": "-> " + up},
		"in a circle":            {"etc": "-> etc"},
	} {
		c, root := newContainer(t, files)
		// An error is valid too; the container then does not start.
		errs := errors.Join(
			updateLDCache.Run(c, map[string][]string{"folder": {"/usr/lib64", "/../../../.." + outside}}),
			createSymlinks.Run(c, map[string][]string{"link": {"/etc/passwd::/etc/ld.so.conf", "x::/usr/lib64/y", "x::../../../.." + outside + "/z"}}),
		)
		entries, err := os.ReadDir(outside)
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) != 1 || read(t, outside+"/ld.so.conf") != "secret" {
			t.Fatalf("%s: a file outside the container was changed: %v (%v)", name, entries, errs)
		}
		_ = filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() && strings.Contains(read(t, file), "secret") {
				t.Errorf("%s: %s has what was outside", name, file)
			}
			return nil
		})
	}
}

// A pipe or a device in place of a file is not opened, because that could block forever.
func TestNoRegularFile(t *testing.T) {
	c, root := newContainer(t, map[string]string{"etc/": ""})
	if err := unix.Mkfifo(root+"/etc/ld.so.cache", 0o600); err != nil {
		t.Fatal(err)
	}
	err := updateLDCache.Run(c, map[string][]string{"folder": {"/usr/lib64"}})
	if err == nil || !strings.Contains(err.Error(), "in the place of a regular file") {
		t.Errorf("error %v", err)
	}
}

func TestCreateSymlinks(t *testing.T) {
	c, root := newContainer(t, map[string]string{"usr/lib/old": "content", "usr/lib/libcuda.so": "-> elsewhere", "lib": "-> usr/lib"})
	links := []string{"libcuda.so.1::/usr/lib/libcuda.so", "../x::/new/dir/link", "target::/lib/old", "target::/lib/old"}
	for range 2 { // the second run changes nothing
		if err := createSymlinks.Run(c, map[string][]string{"link": links}); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{"usr/lib/libcuda.so": "libcuda.so.1", "new/dir/link": "../x", "usr/lib/old": "target"} {
		if got, err := os.Readlink(filepath.Join(root, name)); err != nil || got != want {
			t.Errorf("%s -> %q, %v; want %q", name, got, err, want)
		}
	}
	for _, bad := range []string{"", "x", "::x", "x::", "a::b::c"} {
		if err := createSymlinks.Run(c, map[string][]string{"link": {bad}}); err == nil {
			t.Errorf("link %q: no error", bad)
		}
	}
}

func TestMusl(t *testing.T) {
	loader := "lib/ld-musl-" + kind.musl + ".so.1"
	file := "/etc/ld-musl-" + kind.musl + ".path"
	for before, want := range map[string]string{
		"":                    "/lib\n/usr/local/lib\n/usr/lib\n/usr/lib64\n",
		"/lib:/usr/lib64\n":   "/lib\n/usr/lib64\n",
		"/lib\n/opt/lib\n":    "/lib\n/opt/lib\n/usr/lib64\n",
		"/usr/lib64:/opt/lib": "/usr/lib64\n/opt/lib\n",
	} {
		files := map[string]string{loader: "", "usr/lib64/": ""}
		if before != "" {
			files[file] = before
		}
		c, root := newContainer(t, files)
		if err := updateLDCache.Run(c, map[string][]string{"folder": {"/usr/lib64"}}); err != nil {
			t.Fatal(err)
		}
		if got := read(t, root+file); got != want {
			t.Errorf("before %q: %q; want %q", before, got, want)
		}
		if _, err := os.Stat(root + ldCache); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the cache of another loader was written: %v", err)
		}
	}
}

func TestFolders(t *testing.T) {
	c, _ := newContainer(t, nil)
	for _, bad := range []string{"", "usr/lib64", "/usr/lib\n/tmp", "/usr/lib:/tmp"} {
		if err := updateLDCache.Run(c, map[string][]string{"folder": {bad}}); err == nil {
			t.Errorf("folder %q: no error", bad)
		}
	}
}

// build compiles a C program or library.
func build(t *testing.T, out, source string, args ...string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "cc", append([]string{"-x", "c", "-", "-o", out}, args...)...)
	cmd.Stdin = strings.NewReader(source)
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, said)
	}
}

// loads is a program that loads a library by name, as CUDA programs do, and prints the result of a
// function.
const loads = `
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **args) {
	void *library = dlopen(args[1], RTLD_NOW);
	if (!library) { puts(dlerror()); return 1; }
	puts(((const char *(*)(void))dlsym(library, "who"))());
	return 0;
}`

func who(says string) string { return `const char *who(void) { return "` + says + `"; }` }

// The real loader finds libraries in a directory outside its search path, Red Hat's with Debian's
// loader, and prefers the image's libraries if configured.
func TestRealLoader(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("there is no C compiler: ", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can change its root directory")
	}
	c, root := newContainer(t, nil)
	build(t, root+"/bin/load", loads, "-ldl")
	copyLoader(t, root, root+"/bin/load")
	const version = "570.124.06"
	build(t, root+"/opt/lib64/libcuda.so."+version, who("host"), "-shared", "-Wl,-soname,libcuda.so.1")
	build(t, root+"/opt/lib64/libcuda.so.9.9", who("older"), "-shared", "-Wl,-soname,libcuda.so.1")
	build(t, root+"/usr/local/cuda/compat/libcuda.so.580.1", who("image"), "-shared", "-Wl,-soname,libcuda.so.1")
	name := "libcuda.so.1"
	load := func() string {
		cmd := exec.CommandContext(t.Context(), "/bin/load", name)
		cmd.Dir, cmd.Env = "/", []string{}
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
		out, _ := cmd.CombinedOutput()
		return strings.TrimSpace(string(out))
	}
	if said := load(); !strings.Contains(said, "cannot open shared object file") {
		t.Fatalf("without the hook the library is found, or it fails otherwise: %s", said)
	}
	update := func(folder string) {
		t.Helper()
		if err := updateLDCache.Run(c, map[string][]string{"folder": {folder}}); err != nil {
			t.Fatal(err)
		}
	}
	update("/opt/lib64")
	if said := load(); said != "host" {
		t.Errorf("the loader finds %q; want the host's library", said)
	}
	if err := os.Symlink("libcuda.so.1", root+"/opt/lib64/libcuda.so"); err != nil {
		t.Fatal(err)
	}
	build(t, root+"/opt/lib64/libother.so.0", who("other"), "-shared", "-Wl,-soname,libcuda.so.0")
	update("/opt/lib64")
	for link, want := range map[string]string{"libcuda.so": "host", "libcuda.so." + version: "host", "libother.so.0": "other"} {
		name = link
		if said := load(); said != want {
			t.Errorf("the loader finds %q as %s; want %q", said, name, want)
		}
	}
	name = "libcuda.so.1"
	if link, err := os.Readlink(root + "/opt/lib64/libcuda.so.1"); err != nil || link != "libcuda.so."+version {
		t.Errorf("the link is to %q, %v", link, err)
	}
	if err := os.Remove(root + ldCache); err != nil {
		t.Fatal(err)
	}
	if err := PreferLibraries(c, "/usr/local/cuda/compat"); err != nil {
		t.Fatal(err)
	}
	update("/opt/lib64")
	if said := load(); said != "image" {
		t.Errorf("the loader finds %q; want the image's library", said)
	}
	if diff := cmp.Diff("include /etc/ld.so.conf.d/*.conf\n", read(t, root+ldConf)); diff != "" {
		t.Error(diff)
	}
}

// copyLoader copies the loader and the libraries of a program.
func copyLoader(t *testing.T, root, program string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ldd", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	for field := range strings.FieldsSeq(string(out)) {
		if !strings.HasPrefix(field, "/") {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(root+field), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root+field, []byte(read(t, field)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// FuzzContainer creates malicious links in a container, and writes through them.
func FuzzContainer(f *testing.F) {
	f.Add("etc", "/outside", "etc/ld.so.conf")
	f.Add("a", "../..", "a/b/../../c")
	f.Add("a/b", "/proc/self/root", "a/b/outside/x")
	f.Fuzz(func(t *testing.T, link, target, name string) {
		dir := t.TempDir()
		root, outside := mustMkdir(t, dir+"/rootfs"), mustMkdir(t, dir+"/outside")
		c, err := In(root)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.Link(strings.ReplaceAll(target, "/outside", outside), link)
		_ = c.Write(name, []byte("x"))
		_ = c.Link("y", name+"/z")
		for _, d := range []string{dir, outside} {
			entries, err := os.ReadDir(d)
			if err != nil {
				t.Fatal(err)
			}
			if d == outside && len(entries) > 0 || d == dir && len(entries) != 2 {
				t.Fatalf("link %q -> %q, file %q: %s has %v", link, target, name, d, entries)
			}
		}
	})
}
