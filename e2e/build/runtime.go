package build

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Usual directories of runc and of the CNI plugins.
var (
	runcDirs = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}
	cniDirs  = []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni", "/usr/local/lib/cni"}
)

// cniPlugins are the plugins of a cluster's network.
var cniPlugins = []string{"loopback", "ptp", "host-local"}

// debian lists the Debian packages with runc and the plugins.
var debian = []string{"runc", "containernetworking-plugins"}

// A containerRuntime locates the programs that containerd uses and that are not built here:
// runc needs cgo for libseccomp.
type containerRuntime struct {
	runc string // path of the program
	cni  string // directory of the plugins
}

// findRuntime finds the programs. If any is missing, it installs the Debian packages if
// possible.
func (b Builder) findRuntime(ctx context.Context) (containerRuntime, error) {
	dir := b.prebuilt()
	found, missing := lookForRuntime(dir)
	if missing == nil || dir != "" {
		return found, missing
	}
	apt, err := exec.LookPath("apt-get")
	if err != nil || os.Getuid() != 0 {
		return found, fmt.Errorf("%w; install runc, built with seccomp, and the CNI plugins %s in one of %s (on Debian: apt-get install --no-install-recommends %s)",
			missing, strings.Join(cniPlugins, ", "), strings.Join(cniDirs, ", "), strings.Join(debian, " "))
	}
	if err := b.install(ctx, apt); err != nil {
		return found, errors.Join(missing, err)
	}
	return lookForRuntime("")
}

// lookForRuntime finds the programs in a directory of prebuilt programs, if not "", or in the
// usual directories.
func lookForRuntime(prebuilt string) (containerRuntime, error) {
	first := func(dirs []string) []string {
		if prebuilt == "" {
			return dirs
		}
		return append([]string{prebuilt}, dirs...)
	}
	var found containerRuntime
	var err error
	if found.runc, err = findIn(first(runcDirs), "runc"); err != nil {
		return found, err
	}
	loopback, err := findIn(first(cniDirs), cniPlugins...)
	if err != nil {
		return found, err
	}
	found.cni = filepath.Dir(loopback)
	return found, nil
}

// findIn returns the path of the first file in the first directory that contains all files.
func findIn(dirs []string, files ...string) (string, error) {
	for _, dir := range dirs {
		if hasAll(dir, files) {
			return filepath.Join(dir, files[0]), nil
		}
	}
	return "", fmt.Errorf("no %s in %s", strings.Join(files, ", "), strings.Join(dirs, ", "))
}

func hasAll(dir string, files []string) bool {
	for _, file := range files {
		if _, err := os.Stat(filepath.Join(dir, file)); err != nil {
			return false
		}
	}
	return true
}

// install installs the packages. After a failure, it updates the package lists and tries
// again.
func (b Builder) install(ctx context.Context, apt string) error {
	if b.apt(ctx, apt, append([]string{"install", "--yes", "--no-install-recommends"}, debian...)...) == nil {
		return nil
	}
	if err := b.apt(ctx, apt, "update"); err != nil {
		return err
	}
	return b.apt(ctx, apt, append([]string{"install", "--yes", "--no-install-recommends"}, debian...)...)
}

func (b Builder) apt(ctx context.Context, apt string, args ...string) error {
	cmd := exec.CommandContext(ctx, apt, args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	what := "apt-get " + strings.Join(args, " ")
	if err := b.run(cmd, what); err != nil {
		return fmt.Errorf("%s: %w\n%s", what, err, strings.TrimSpace(out.String()))
	}
	return nil
}
