// Package debian fetches kernels, QEMU and tools of Debian 12 and unpacks them into a cache
// directory. It takes the packages from the Debian archive that this machine's apt is configured to
// use, whatever the machine's own release is. It installs nothing, and keeps package lists of its
// own. It takes the versions in the archive, and checks the archive once a day.
package debian

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"chandler.dev/e2e/build"
)

// backports is the release of packages that are requested in the newer version.
const backports = "bookworm-backports"

// qemu is the package of the emulator.
const qemu = "qemu-system-x86"

// toolPackages are the packages of the programs for guests, without dependencies.
var toolPackages = []string{
	"busybox-static", "dash", "kmod", "pciutils", "iproute2", "nvme-cli", "e2fsprogs", "util-linux", "mount", "xz-utils",
	"mdadm", "ethtool", "runc",
}

// An Archive is the Debian archive with a directory of fetched packages.
type Archive struct {
	Dir      string
	Progress io.Writer // receives messages about slow steps; may be nil
}

// A Kernel is an unpacked kernel.
type Kernel struct {
	Release string // as reported by uname -r
	Root    string // of the unpacked package
	Image   string // the path of vmlinuz
	Modules string // the directory lib/modules/RELEASE, with the files of depmod
}

// Root is a directory with unpacked packages and all dependencies, including the C library.
type Root string

// state is the root for a request, and the time of the last check of the archive.
type state struct {
	Asked time.Time
	Root  string
}

// fresh is the validity of an answer of the archive. kept is the time after which an unused package
// is removed.
const (
	fresh = 24 * time.Hour
	kept  = 14 * fresh
)

// Kernel returns the kernel of Debian 12, or the newer one of its backports.
func (a Archive) Kernel(ctx context.Context, newer bool) (Kernel, error) {
	tools, err := a.Tools(ctx)
	if err != nil {
		return Kernel{}, err
	}
	dir, err := a.find(ctx, name("kernel", newer), func() (string, error) {
		image, err := a.depends(ctx, "linux-image-amd64", newer, "linux-image-")
		if err != nil {
			return "", err
		}
		root, err := a.named(ctx, image, newer)
		if err != nil {
			return "", err
		}
		fetch := func(dir string) error { return a.download(ctx, newer, dir, image) }
		return root, a.unpack(ctx, root, fetch, func(root string) error { return depmod(ctx, tools, root) })
	})
	if err != nil {
		return Kernel{}, err
	}
	return kernelIn(dir)
}

// Headers returns a directory with the files to build modules for the kernel: make finds the
// kernel's build tree at usr/src/linux-headers-RELEASE.
func (a Archive) Headers(ctx context.Context, newer bool) (string, error) {
	return a.find(ctx, name("headers", newer), func() (string, error) {
		headers, err := a.depends(ctx, "linux-headers-amd64", newer, "linux-headers-")
		if err != nil {
			return "", err
		}
		packages := []string{headers}
		for _, prefix := range []string{"linux-headers-", "linux-kbuild-"} { // the common headers and the programs
			pkg, err := a.depends(ctx, headers, newer, prefix)
			if err != nil {
				return "", err
			}
			packages = append(packages, pkg)
		}
		root, err := a.named(ctx, headers, newer)
		if err != nil {
			return "", err
		}
		return root, a.unpack(ctx, root, func(dir string) error { return a.download(ctx, newer, dir, packages...) }, relocate)
	})
}

// QEMU returns a root with the QEMU of Debian 12, or the one of its backports.
func (a Archive) QEMU(ctx context.Context, newer bool) (Root, error) {
	dir, err := a.find(ctx, name("qemu", newer), func() (string, error) {
		root, err := a.named(ctx, qemu, newer)
		if err != nil {
			return "", err
		}
		return root, a.unpack(ctx, root, func(dir string) error { return a.closure(ctx, newer, dir, qemu) }, nil)
	})
	return Root(dir), err
}

// Tools returns a root with the programs for guests.
func (a Archive) Tools(ctx context.Context) (Root, error) {
	root := fmt.Sprintf("tools_%08x", crc32.ChecksumIEEE([]byte(strings.Join(toolPackages, " "))))
	dir, err := a.find(ctx, root, func() (string, error) {
		return root, a.unpack(ctx, root, func(dir string) error { return a.closure(ctx, false, dir, toolPackages...) }, nil)
	})
	return Root(dir), err
}

// relocate makes the build tree search the common headers in the same root instead of /usr/src of
// this machine.
func relocate(root string) error {
	makefiles, err := filepath.Glob(filepath.Join(root, "usr/src/linux-headers-*-amd64/Makefile"))
	if err != nil {
		return err
	}
	for _, path := range makefiles {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		beside := strings.ReplaceAll(string(text), "include /usr/src/", "include $(dir $(lastword $(MAKEFILE_LIST)))../")
		if err := os.WriteFile(path, []byte(beside), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func name(what string, newer bool) string {
	if newer {
		return what + " " + backports
	}
	return what
}

// find returns the directory for a request: the one found last, or a new one after a check of the
// archive. If the archive is unreachable, the directory of an earlier day is used.
func (a Archive) find(ctx context.Context, what string, ask func() (string, error)) (string, error) {
	if err := os.MkdirAll(a.roots(), 0o755); err != nil {
		return "", err
	}
	file := filepath.Join(a.Dir, strings.ReplaceAll(what, " ", "-")+".json")
	unlock, err := build.Lock(ctx, file+".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	s := readState(file)
	_, err = os.Stat(filepath.Join(a.roots(), s.Root))
	there := s.Root != "" && err == nil
	if !there || time.Since(s.Asked) > fresh {
		root, err := ask()
		switch {
		case err == nil:
			s = state{Asked: time.Now(), Root: root}
			if err := s.write(file); err != nil {
				return "", err
			}
		case !there:
			return "", fmt.Errorf("fetch %s from Debian: %w", what, err)
		default:
			a.say("%v: %s, which was fetched on another day, does", err, s.Root)
		}
	}
	path := filepath.Join(a.roots(), s.Root)
	now := time.Now()
	return path, errors.Join(os.Chtimes(path, now, now), a.sweep())
}

func (a Archive) roots() string { return filepath.Join(a.Dir, "roots") }

func readState(file string) state {
	var s state
	if data, err := os.ReadFile(file); err != nil || json.Unmarshal(data, &s) != nil {
		return state{}
	}
	return s
}

func (s state) write(file string) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", data, 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// sweep removes directories that were not used for a long time.
func (a Archive) sweep() error {
	entries, err := os.ReadDir(a.roots())
	if err != nil {
		return err
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err == nil && time.Since(info.ModTime()) > kept {
			err = os.RemoveAll(filepath.Join(a.roots(), entry.Name()))
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// kernelIn returns the kernel in the root of an unpacked package.
func kernelIn(root string) (Kernel, error) {
	for _, lib := range []string{"lib", "usr/lib"} {
		dirs, err := filepath.Glob(filepath.Join(root, lib, "modules", "*"))
		if err != nil || len(dirs) == 0 {
			continue
		}
		release := filepath.Base(dirs[0])
		for _, image := range []string{filepath.Join(root, "boot", "vmlinuz-"+release), filepath.Join(dirs[0], "vmlinuz")} {
			if _, err := os.Stat(image); err == nil {
				return Kernel{Release: release, Root: root, Image: image, Modules: dirs[0]}, nil
			}
		}
	}
	return Kernel{}, fmt.Errorf("%s holds no kernel with modules", root)
}

// depmod creates the module lists that Debian creates at the installation of a kernel.
func depmod(ctx context.Context, tools Root, root string) error {
	k, err := kernelIn(root)
	if err != nil {
		return err
	}
	return tools.Depmod(ctx, strings.TrimSuffix(k.Modules, "/lib/modules/"+k.Release), k.Release)
}

// Depmod creates the lists of the modules below lib/modules in a directory.
func (r Root) Depmod(ctx context.Context, dir, release string) error {
	cmd, err := r.Command(ctx, "kmod", "-b", dir, release)
	if err != nil {
		return err
	}
	cmd.Args = slices.Insert(cmd.Args, 1, "--argv0", "depmod") // kmod selects its function by argv[0]
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("depmod: %w\n%s", err, out)
	}
	return nil
}

// binaries are the directories of programs in a root, and libraries the directories of libraries.
var (
	binaries  = []string{"usr/bin", "bin", "usr/sbin", "sbin"}
	libraries = []string{"lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/lib"}
)

// Program returns the path of a program in the root.
func (r Root) Program(program string) (string, error) {
	return r.lookup(binaries, program)
}

// Library returns the path of a library in the root.
func (r Root) Library(library string) (string, error) {
	return r.lookup(libraries, library)
}

func (r Root) lookup(dirs []string, file string) (string, error) {
	for _, dir := range dirs {
		path := filepath.Join(string(r), dir, file)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is not in %s", file, r)
}

// loader is the path of the dynamic linker in a root.
const loader = "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"

// Command returns a command to run a program of the root on this machine, with the root's own
// libraries instead of the machine's.
func (r Root) Command(ctx context.Context, program string, args ...string) (*exec.Cmd, error) {
	path, err := r.Program(program)
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, dir := range libraries {
		dirs = append(dirs, filepath.Join(string(r), dir))
	}
	start := []string{"--library-path", strings.Join(dirs, ":"), path}
	return exec.CommandContext(ctx, filepath.Join(string(r), loader), append(start, args...)...), nil
}

func (a Archive) say(format string, args ...any) {
	if a.Progress != nil {
		fmt.Fprintf(a.Progress, format+"\n", args...)
	}
}
