// Package debian fetches kernels, QEMU and tools from Debian's archive and unpacks them into a cache directory. It
// installs nothing, and leaves apt's own configuration and lists alone. It takes the versions that the archive has,
// and asks the archive once a day.
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

// Sources is where packages come from: Debian 12 and its backports.
const sources = `Types: deb
URIs: http://deb.debian.org/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.debian.org/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
`

// backports is the release from which a package comes only where it is asked for.
const backports = "bookworm-backports"

// qemu is the package of the emulator.
const qemu = "qemu-system-x86"

// toolPackages are those of the programs that guests can have, beside what these depend on.
var toolPackages = []string{
	"busybox-static", "dash", "kmod", "pciutils", "iproute2", "nvme-cli", "e2fsprogs", "util-linux", "mount", "xz-utils",
	"mdadm", "ethtool", "runc",
}

// An Archive is Debian's archive, and a directory in which there is what was fetched from it.
type Archive struct {
	Dir      string
	Progress io.Writer // told what takes time; may be nil
}

// A Kernel is an unpacked kernel.
type Kernel struct {
	Release string // as uname -r says it
	Root    string // of the unpacked package
	Image   string // the path of vmlinuz
	Modules string // the directory lib/modules/RELEASE, with the files that depmod makes
}

// Root is a directory with unpacked packages and all that they depend on, the C library too.
type Root string

// state says which root is the one for what was asked for, and when the archive was asked.
type state struct {
	Asked time.Time
	Root  string
}

// fresh is how long an answer of the archive is good, and kept how long an unpacked package that nobody asks for.
const (
	fresh = 24 * time.Hour
	kept  = 14 * fresh
)

// Kernel returns Debian 12's kernel, or the one in its backports, which is newer.
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

// Headers returns what modules for that kernel are built with: a directory in which make finds the kernel's build tree
// at usr/src/linux-headers-RELEASE.
func (a Archive) Headers(ctx context.Context, newer bool) (string, error) {
	return a.find(ctx, name("headers", newer), func() (string, error) {
		headers, err := a.depends(ctx, "linux-headers-amd64", newer, "linux-headers-")
		if err != nil {
			return "", err
		}
		packages := []string{headers}
		for _, prefix := range []string{"linux-headers-", "linux-kbuild-"} { // the common ones, and the programs
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

// QEMU returns a root with Debian 12's QEMU, or the one in its backports.
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

// Tools returns a root with the programs that guests can have.
func (a Archive) Tools(ctx context.Context) (Root, error) {
	root := fmt.Sprintf("tools_%08x", crc32.ChecksumIEEE([]byte(strings.Join(toolPackages, " "))))
	dir, err := a.find(ctx, root, func() (string, error) {
		return root, a.unpack(ctx, root, func(dir string) error { return a.closure(ctx, false, dir, toolPackages...) }, nil)
	})
	return Root(dir), err
}

// relocate has the build tree look for the common headers beside itself, and not in /usr/src of this machine.
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

// find returns the directory for what is asked for, as it was last found or by asking the archive anew. If the archive
// cannot be reached, that of an earlier day does.
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

// sweep removes what nobody has asked for in a long time.
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

// depmod makes the lists of modules that Debian makes when a kernel is installed.
func depmod(ctx context.Context, tools Root, root string) error {
	k, err := kernelIn(root)
	if err != nil {
		return err
	}
	return tools.Depmod(ctx, strings.TrimSuffix(k.Modules, "/lib/modules/"+k.Release), k.Release)
}

// Depmod makes the lists of the modules below lib/modules in a directory.
func (r Root) Depmod(ctx context.Context, dir, release string) error {
	cmd, err := r.Command(ctx, "kmod", "-b", dir, release)
	if err != nil {
		return err
	}
	cmd.Args = slices.Insert(cmd.Args, 1, "--argv0", "depmod") // the program is what it is called
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("depmod: %w\n%s", err, out)
	}
	return nil
}

// binaries are the directories of programs, and libraries those of libraries, in a root.
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

// loader is the dynamic linker, by its path in a root.
const loader = "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"

// Command returns a command that runs a program of the root on this machine, with the root's own libraries, whatever
// the machine has.
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
