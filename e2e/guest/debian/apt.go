package debian

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"chandler.dev/e2e/build"
)

// depends returns the dependency of a package that begins with prefix.
func (a Archive) depends(ctx context.Context, pkg string, newer bool, prefix string) (string, error) {
	list, err := a.field(ctx, pkg, newer, "Depends")
	if err != nil {
		return "", err
	}
	for dependency := range strings.SplitSeq(list, ",") {
		if fields := strings.Fields(dependency); len(fields) > 0 && strings.HasPrefix(fields[0], prefix) {
			return fields[0], nil
		}
	}
	return "", fmt.Errorf("package %s depends on no %s…", pkg, prefix)
}

// field returns a field of a package's entry in the archive.
func (a Archive) field(ctx context.Context, pkg string, newer bool, field string) (string, error) {
	if err := a.update(ctx); err != nil {
		return "", err
	}
	shown, err := a.apt(ctx, "apt-cache", release(newer, "show", "--no-all-versions", pkg)...)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(shown) {
		if value, found := strings.CutPrefix(line, field+": "); found {
			return strings.TrimSpace(value), nil
		}
	}
	return "", fmt.Errorf("package %s has no field %s", pkg, field)
}

// named returns the name of a package's root. The name contains the version.
func (a Archive) named(ctx context.Context, pkg string, newer bool) (string, error) {
	version, err := a.field(ctx, pkg, newer, "Version")
	return pkg + "_" + strings.ReplaceAll(version, ":", "."), err
}

// download fetches packages into a directory. closure also fetches all dependencies.
func (a Archive) download(ctx context.Context, newer bool, dir string, packages ...string) error {
	cmd := a.command(ctx, "apt-get", release(newer, append([]string{"download"}, packages...)...)...)
	cmd.Dir = dir
	return a.run(cmd, "fetching "+strings.Join(packages, " "))
}

func (a Archive) closure(ctx context.Context, newer bool, dir string, packages ...string) error {
	if err := a.update(ctx); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "partial"), 0o755); err != nil {
		return err
	}
	args := []string{"install", "--yes", "--download-only", "--no-install-recommends", "-o", "Dir::Cache::archives=" + dir}
	return a.run(a.command(ctx, "apt-get", release(newer, append(args, packages...)...)...), "fetching "+strings.Join(packages, " "))
}

// unpack creates the root with a name, unless it exists, from the packages that fetch leaves in a
// directory. further changes the root before the root is visible, so that no incomplete root is
// ever visible.
func (a Archive) unpack(ctx context.Context, name string, fetch, further func(dir string) error) error {
	final := filepath.Join(a.roots(), name)
	if _, err := os.Stat(final); err == nil {
		return nil
	}
	dir, err := os.MkdirTemp(a.Dir, "fetch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	packages, root := filepath.Join(dir, "packages"), filepath.Join(dir, "root")
	if err := errors.Join(os.Mkdir(packages, 0o755), os.Mkdir(root, 0o755)); err != nil {
		return err
	}
	if err := fetch(packages); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(packages, "*.deb"))
	if err != nil {
		return err
	}
	for _, file := range files {
		if out, err := exec.CommandContext(ctx, "dpkg-deb", "--extract", file, root).CombinedOutput(); err != nil {
			return fmt.Errorf("unpack %s: %w\n%s", filepath.Base(file), err, out)
		}
	}
	if further != nil {
		if err := further(root); err != nil {
			return err
		}
	}
	a.say("unpacked %s", name)
	return os.Rename(root, final)
}

// release adds the option to prefer packages of the backports.
func release(newer bool, args ...string) []string {
	if newer {
		return append(args, "-o", "APT::Default-Release="+backports)
	}
	return args
}

// update runs the update of apt, unless it ran today.
func (a Archive) update(ctx context.Context) error {
	unlock, err := build.Lock(ctx, filepath.Join(a.Dir, "lock-apt"))
	if err != nil {
		return err
	}
	defer unlock()
	stamp := a.aptDir("updated")
	if info, err := os.Stat(stamp); err == nil && time.Since(info.ModTime()) < fresh {
		return nil
	}
	for _, dir := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(a.aptDir(dir), 0o755); err != nil {
			return err
		}
	}
	text, err := a.sources(ctx)
	if err != nil {
		return err
	}
	if err := os.WriteFile(a.aptDir("debian.sources"), []byte(text), 0o644); err != nil {
		return err
	}
	if err := a.run(a.command(ctx, "apt-get", "update", "--error-on=any"), "updating the package lists"); err != nil {
		return err
	}
	return os.WriteFile(stamp, nil, 0o644)
}

// keyring is the file with the keys of the Debian archive.
const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// targetFormat makes apt-get indextargets print the origin, the label and the URI of each
// repository.
const targetFormat = "$(ORIGIN)|$(LABEL)|$(REPO_URI)"

// ErrNoArchive is the error if this machine's apt is not configured to use a Debian archive.
var ErrNoArchive = errors.New("apt is not configured to use a Debian archive")

// sources returns package sources for Debian 12 and its backports, on the servers that this
// machine's apt is configured to use. Only package lists contain the origin of a repository. If
// this machine has no lists, as in many images of containers, sources fetches lists into its own
// directory.
func (a Archive) sources(ctx context.Context) (string, error) {
	for _, program := range []string{"apt-get", "dpkg-deb"} {
		if _, err := exec.LookPath(program); err != nil {
			return "", fmt.Errorf("%w: %w", ErrNoArchive, err)
		}
	}
	targets, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", targetFormat).Output()
	if err != nil {
		return "", fmt.Errorf("apt-get indextargets: %w", err)
	}
	text, err := sourcesOf(string(targets))
	if !errors.Is(err, ErrNoArchive) {
		return text, err
	}
	lists := a.aptDir("machine")
	if err := os.MkdirAll(filepath.Join(lists, "partial"), 0o755); err != nil {
		return "", err
	}
	option := []string{"-o", "Dir::State::lists=" + lists, "-o", "Dir::Cache=" + a.aptDir("cache"), "-o", "APT::Sandbox::User=root"}
	// Other repositories may be unreachable, which does not matter if a Debian archive is found.
	updateErr := a.run(exec.CommandContext(ctx, "apt-get", append(option, "update")...), "looking for the Debian archive")
	targets, err = exec.CommandContext(ctx, "apt-get", append(option, "indextargets", "--format", targetFormat)...).Output()
	if err != nil {
		return "", errors.Join(updateErr, fmt.Errorf("apt-get indextargets: %w", err))
	}
	if text, err = sourcesOf(string(targets)); err != nil {
		return "", errors.Join(err, updateErr)
	}
	return text, nil
}

// sourcesOf returns package sources for Debian 12 on the first servers with the Debian archive and
// with its security updates, in lines of targetFormat.
func sourcesOf(targets string) (string, error) {
	var archive, security string
	for line := range strings.Lines(targets) {
		fields := strings.Split(strings.TrimSpace(line), "|")
		if len(fields) != 3 || fields[0] != "Debian" {
			continue
		}
		switch uri := fields[2]; fields[1] {
		case "Debian":
			archive = cmp.Or(archive, uri)
		case "Debian-Security":
			security = cmp.Or(security, uri)
		}
	}
	if archive == "" {
		return "", ErrNoArchive
	}
	text := source(archive, "bookworm", "bookworm-updates", backports)
	if security != "" {
		text += "\n" + source(security, "bookworm-security")
	}
	return text, nil
}

func source(uri string, suites ...string) string {
	return fmt.Sprintf("Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n", uri, strings.Join(suites, " "), keyring)
}

func (a Archive) aptDir(name string) string { return filepath.Join(a.Dir, "apt", name) }

// command returns an apt command that ignores the machine's own packages and lists.
func (a Archive) command(ctx context.Context, program string, args ...string) *exec.Cmd {
	options := []string{
		"-q", "-o", "Dir::Etc::sourcelist=" + a.aptDir("debian.sources"), "-o", "Dir::Etc::sourceparts=-",
		"-o", "Dir::Etc::preferences=-", "-o", "Dir::Etc::preferencesparts=-",
		"-o", "Dir::State=" + a.aptDir("state"), "-o", "Dir::State::status=/dev/null", "-o", "Dir::Cache=" + a.aptDir("cache"),
		"-o", "APT::Architecture=amd64", "-o", "APT::Architectures=amd64", "-o", "APT::Sandbox::User=root",
		"-o", "Acquire::Languages=none", "-o", "Acquire::Retries=3",
	}
	cmd := exec.CommandContext(ctx, program, append(options, args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	return cmd
}

func (a Archive) apt(ctx context.Context, program string, args ...string) (string, error) {
	cmd := a.command(ctx, program, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", program, args[0], err, stderr.String())
	}
	return string(out), nil
}

// run runs a command and reports from time to time that it is still running.
func (a Archive) run(cmd *exec.Cmd, doing string) error {
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	a.say("%s", doing)
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			if err != nil {
				return fmt.Errorf("%s: %w\n%s", doing, err, strings.TrimSpace(out.String()))
			}
			return nil
		case now := <-tick.C:
			a.say("%s: %s so far", doing, now.Sub(begin).Round(time.Second))
		}
	}
}
