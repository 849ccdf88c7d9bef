package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cavaliergopher/cpio"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/guest/debian"
	"chandler.dev/e2e/guest/inside"
)

// The modules and tools of every guest.
var (
	alwaysModules = []string{"virtio_pci", "virtio_console", "ext4", "crc32c_generic", "configfs"}
	alwaysTools   = []string{"dash", "kmod"}
)

// A tree is the content of an initramfs: files of the host, links and texts, by path in the guest.
type tree struct {
	files map[string]string
	links map[string]string
	texts map[string]string
}

func writeInitramfs(ctx context.Context, to string, kernel debian.Kernel, tools debian.Root, c Config) error {
	t := tree{files: make(map[string]string), links: make(map[string]string), texts: make(map[string]string)}
	init, err := buildProgram(ctx, "", "chandler.dev/e2e/cmd/guestinit")
	if err != nil {
		return err
	}
	program, err := buildProgram(ctx, "..", agent)
	if err != nil {
		return err
	}
	t.files["init"], t.files["usr/bin/chandler"] = init, program
	for name, path := range c.Programs {
		t.files["usr/bin/"+name] = path
	}
	for path, content := range c.Files {
		t.texts[strings.TrimPrefix(path, "/")] = content
	}
	t.texts[strings.TrimPrefix(inside.ModulesFile, "/")] = strings.Join(c.Modules, "\n")
	t.texts["etc/passwd"] = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
	t.texts["etc/group"] = "root:x:0:\nnogroup:x:65534:\n"
	if err := t.addTools(ctx, tools, append(c.Tools, alwaysTools...)); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(to), "modules-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	modules, err := buildModules(ctx, dir, kernel, c, slices.Concat(alwaysModules, c.Modules, c.Carry))
	if err != nil {
		return err
	}
	if err := t.addModules(ctx, dir, kernel, tools, modules); err != nil {
		return err
	}
	return t.write(to)
}

// addTools adds busybox with all its applets, and the tools with their libraries.
func (t tree) addTools(ctx context.Context, root debian.Root, tools []string) error {
	busybox, err := root.Program("busybox")
	if err != nil {
		return err
	}
	t.files["bin/busybox"] = busybox
	applets, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("busybox --list: %w", err)
	}
	for applet := range strings.FieldsSeq(string(applets)) {
		if applet != "busybox" {
			t.links["bin/"+applet] = "busybox"
		}
	}
	t.links["bin/sh"] = "/usr/bin/dash"
	for _, name := range []string{"modprobe", "rmmod", "insmod", "lsmod", "modinfo", "depmod"} {
		t.links["usr/bin/"+name] = "kmod"
	}
	for _, tool := range tools {
		path, err := root.Program(tool)
		if err != nil {
			return err
		}
		t.files["usr/bin/"+tool] = path
		if err := t.addLibraries(root, path); err != nil {
			return err
		}
	}
	return nil
}

// addLibraries adds the libraries that a program needs.
func (t tree) addLibraries(root debian.Root, path string) error {
	const dir = "lib/x86_64-linux-gnu/"
	file, err := elf.Open(path)
	if err != nil {
		return nil // a script, or a program for another machine
	}
	defer file.Close()
	needed, err := file.ImportedLibraries()
	if err != nil {
		return err
	}
	for _, program := range file.Progs {
		if program.Type == elf.PT_INTERP {
			needed = append(needed, "ld-linux-x86-64.so.2")
			t.links["lib64/ld-linux-x86-64.so.2"] = "/" + dir + "ld-linux-x86-64.so.2"
		}
	}
	for _, name := range needed {
		if _, there := t.files[dir+name]; there {
			continue
		}
		library, err := root.Library(name)
		if err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(path), err)
		}
		t.files[dir+name] = library
		if err := t.addLibraries(root, library); err != nil {
			return err
		}
	}
	return nil
}

// addModules adds the modules and their dependencies, unpacked, and a new module list.
func (t tree) addModules(ctx context.Context, dir string, kernel debian.Kernel, tools debian.Root, modules []string) error {
	list, err := readModules(kernel.Modules)
	if err != nil {
		return err
	}
	in := filepath.Join(dir, "lib/modules", kernel.Release)
	var compressed []string
	for _, file := range list.closure(modules) {
		if list.err != nil {
			break
		}
		to := filepath.Join(in, file)
		data, err := os.ReadFile(filepath.Join(kernel.Modules, file))
		if err == nil {
			err = errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, data, 0o644))
		}
		if err != nil {
			return err
		}
		if strings.HasSuffix(to, ".xz") {
			compressed = append(compressed, to)
		}
	}
	if list.err != nil {
		return list.err
	}
	if len(compressed) > 0 {
		xz, err := tools.Command(ctx, "xz", append([]string{"--decompress", "--"}, compressed...)...)
		if err != nil {
			return err
		}
		if out, err := xz.CombinedOutput(); err != nil {
			return fmt.Errorf("xz: %w\n%s", err, out)
		}
	}
	for _, name := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order", "modules.softdep"} {
		data, err := os.ReadFile(filepath.Join(kernel.Modules, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(in, name), data, 0o644)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := tools.Depmod(ctx, dir, kernel.Release); err != nil {
		return err
	}
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			t.files[strings.TrimPrefix(path, dir+"/")] = path
		}
		return err
	})
}

// write writes the tree with all parent directories as an archive in the kernel's format
// (Documentation/driver-api/early-userspace/buffer-format.rst).
func (t tree) write(to string) error {
	file, err := os.Create(to)
	if err != nil {
		return err
	}
	defer file.Close()
	a := &archiveWriter{w: cpio.NewWriter(file), made: map[string]bool{".": true}}
	for _, dir := range []string{"dev", "proc", "sys", "tmp", "run", "root", "mnt", "var/lib", "etc"} {
		a.dir(dir)
	}
	for path, target := range t.links {
		if t.files[path] == "" {
			a.add(&cpio.Header{Name: path, Mode: cpio.TypeSymlink | 0o777, Size: int64(len(target))}, []byte(target))
		}
	}
	for path, text := range t.texts {
		a.add(&cpio.Header{Name: path, Mode: cpio.TypeReg | 0o644, Size: int64(len(text))}, []byte(text))
	}
	for path, source := range t.files {
		data, err := os.ReadFile(source)
		if err != nil {
			return err
		}
		a.add(&cpio.Header{Name: path, Mode: cpio.TypeReg | 0o755, Size: int64(len(data))}, data)
	}
	return errors.Join(a.err, a.w.Close(), file.Close())
}

// An archiveWriter writes directories before their entries, and keeps its first error.
type archiveWriter struct {
	w    *cpio.Writer
	made map[string]bool
	err  error
}

func (a *archiveWriter) dir(path string) {
	if a.made[path] {
		return
	}
	a.made[path] = true
	a.add(&cpio.Header{Name: path, Mode: cpio.TypeDir | 0o755}, nil)
}

func (a *archiveWriter) add(header *cpio.Header, data []byte) {
	a.dir(filepath.Dir(header.Name))
	if a.err != nil {
		return
	}
	if a.err = a.w.WriteHeader(header); a.err == nil && len(data) > 0 {
		_, a.err = bytes.NewReader(data).WriteTo(a.w)
	}
}

// Build builds a static program of this module or of the product, for the Programs of a Config, and
// returns its path.
func Build(t testing.TB, pkg string) string {
	t.Helper()
	module := ""
	if !strings.HasPrefix(pkg, "chandler.dev/e2e/") {
		module = ".."
	}
	path, err := buildProgram(t.Context(), module, pkg)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// builds are the programs already built by this process.
var builds sync.Map

// agent is the package of the agent. Every guest has the agent.
const agent = "chandler.dev/cmd/chandler"

// hostProgram is the package of chandler-host, which guests have with a mock in place of NVML. It
// needs a C compiler: see [HasCompiler].
const hostProgram = "chandler.dev/cmd/chandler-host"

// buildProgram builds a program of a module; the module is a directory relative to this module's
// root. Each checkout has its own directory for programs, because tests of several checkouts may
// run at once.
func buildProgram(ctx context.Context, module, pkg string) (string, error) {
	if path, built := builds.Load(pkg); built {
		return path.(string), nil
	}
	root, err := moduleRoot(ctx)
	if err != nil {
		return "", err
	}
	archive, err := archive()
	if err != nil {
		return "", err
	}
	b := build.Builder{Cache: filepath.Join(archive.Dir, "checkouts", fmt.Sprintf("%x", sha256.Sum256([]byte(root)))[:12]), Progress: os.Stderr}
	var path string
	switch pkg {
	case agent:
		path, err = b.Agent(ctx, filepath.Dir(root)) // with its version
	case hostProgram:
		path, err = b.MockedNVML(ctx, filepath.Dir(root))
	default:
		path, err = b.Static(ctx, filepath.Join(root, module), pkg)
	}
	if err != nil {
		return "", err
	}
	builds.Store(pkg, path)
	return path, nil
}

func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// archive returns the Debian archive, in a cache for all tests of this user.
func archive() (debian.Archive, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return debian.Archive{}, err
	}
	return debian.Archive{Dir: filepath.Join(cache, "chandler-e2e", "guest"), Progress: os.Stderr}, nil
}
