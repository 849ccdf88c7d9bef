package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// libcVersion is the version of Debian's C library in the image with NVML. The image does not
// use the C library of the build machine, nor a base image with a shell and more. The packages
// are verified by digest. When Debian has replaced the version, enter the new version here,
// and the digests printed by "apt-cache show libc6" for each platform.
const libcVersion = "2.36-9+deb12u14"

var libcDigests = map[string]string{
	"amd64": "ba4f88f73dbc3ae9055f3c20f4523bfdbaf1ad13ff95e258924f77d20b4fbedf",
	"arm64": "01f4330719fd4f65580e16ea5a0527f372fca750e8f588d26deaf09f2d3b1cf4",
}

// libcFiles are the files of the package that the image contains: the libraries for
// chandler-host and libnvidia-ml.so.1 (readelf -d), and the licence.
var libcFiles = []string{
	"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "copyright",
}

// libc returns the files of the C library, by path in the image.
func (r *release) libc(ctx context.Context, arch string) (map[string]file, error) {
	pkg, err := r.libcPackage(ctx, arch)
	if err != nil {
		return nil, fmt.Errorf("C library for linux/%s: %w", arch, err)
	}
	cmd := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", pkg)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	content, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("dpkg-deb: %w\n%s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	files := make(map[string]file)
	archive := tar.NewReader(bytes.NewReader(content))
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Base(pkg), err)
		}
		if !slices.Contains(libcFiles, path.Base(header.Name)) {
			continue
		}
		f := file{mode: header.Mode & 0o777, link: header.Linkname}
		if f.content, err = io.ReadAll(archive); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", filepath.Base(pkg), header.Name, err)
		}
		files[strings.TrimPrefix(path.Clean(header.Name), "/")] = f
	}
	return files, nil
}

// libcPackage returns the path of the package in the user's cache, and downloads the package
// if necessary.
func (r *release) libcPackage(ctx context.Context, arch string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	cache = filepath.Join(cache, "chandler-release")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	name := fmt.Sprintf("libc6_%s_%s.deb", libcVersion, arch)
	pkg := filepath.Join(cache, name)
	if is(pkg, libcDigests[arch]) == nil {
		return pkg, nil
	}
	r.say("fetching %s", name)
	dir, err := os.MkdirTemp("", "chandler-libc-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	if err := fetch(ctx, dir, arch); err != nil {
		return "", err
	}
	fetched := filepath.Join(dir, name)
	if err := is(fetched, libcDigests[arch]); err != nil {
		return "", err
	}
	content, err := os.ReadFile(fetched)
	if err != nil {
		return "", err
	}
	return pkg, os.WriteFile(pkg, content, 0o644)
}

// fetch downloads the package with apt, from this machine's package sources and with its keys.
// The package lists are separate from the machine's, so the platform may differ and the
// machine remains unchanged.
func fetch(ctx context.Context, dir, arch string) error {
	options := []string{
		"-qq", "-o", "APT::Architecture=" + arch, "-o", "APT::Architectures=" + arch, "-o", "APT::Sandbox::User=root",
		"-o", "Dir::State=" + dir + "/state", "-o", "Dir::State::status=/dev/null", "-o", "Dir::Cache=" + dir + "/cache",
	}
	for _, made := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, made), 0o755); err != nil {
			return err
		}
	}
	for _, args := range [][]string{{"update"}, {"download", "libc6=" + libcVersion}} {
		cmd := exec.CommandContext(ctx, "apt-get", append(options, args...)...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get %s: %w\n%s\nIf Debian has no libc6 %s any more, put the present version into libc.go",
				strings.Join(args, " "), err, bytes.TrimSpace(out), libcVersion)
		}
	}
	return nil
}

// is returns an error unless the file has the digest.
func is(path, digest string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if got := fmt.Sprintf("%x", sha256.Sum256(content)); got != digest {
		return fmt.Errorf("%s: its SHA-256 is %s, not %s", filepath.Base(path), got, digest)
	}
	return nil
}
