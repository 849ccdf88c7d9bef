// Package build builds or finds the programs for a cluster on one machine. Builds use Go's
// build cache, so repeated calls take seconds. The package runs none of the programs.
package build

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Supported versions of Kubernetes.
const (
	Version = "v1.37.0" // according to go.mod
	Oldest  = "v1.34.4" // according to kube-1.34/go.mod: the first minor version with resource.k8s.io/v1
	Classic = "v1.31.0" // according to kube-1.31/go.mod: the API server does not serve resource.k8s.io by default
)

// kubes maps versions to the folders of the Kubernetes programs.
var kubes = map[string]string{
	Version: "cmd/kube",
	Oldest:  "kube-1.34", // a separate module
	Classic: "kube-1.31", // a separate module
}

// managers maps versions to the folders of the programs with the kubelet's device manager.
var managers = map[string]string{
	Version: "cmd/devicemanager",
	Classic: "kube-1.31/devicemanager-1.31",
}

// Versions returns the supported versions of Kubernetes, the oldest first.
func Versions() []string { return slices.Sorted(maps.Keys(kubes)) }

// clusterPackages are the packages of programs for every cluster. They are built into one
// directory, and named by the last element of their paths.
var clusterPackages = []string{
	"chandler.dev/e2e/cmd/base",
	"chandler.dev/e2e/cmd/machine",
	"chandler.dev/e2e/cmd/pause",
	"chandler.dev/e2e/cmd/probe",
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
}

// A Builder builds into a cache directory. The zero value is ready to use.
type Builder struct {
	// Kubernetes is the version that Cluster builds, one of Versions. The default is Version.
	Kubernetes string
	// Cache is chandler-e2e in the user's cache directory by default. Programs are in its folder
	// bin.
	Cache string
	// Module is any directory in this module, the current directory by default.
	Module string
	// Prebuilt is a directory of programs for machines without Go, such as a copy of Cache's folder
	// bin. The Builder then builds and installs nothing. It prefers runc and CNI plugins in that
	// directory to those of the host. The default is the environment variable
	// CHANDLER_E2E_PROGRAMS.
	Prebuilt string
	// Progress receives messages about slow operations, unless nil.
	Progress io.Writer

	env []string // additional environment variables of go build
}

// Programs locates all programs of the host that a cluster needs.
type Programs struct {
	// Dir contains the built programs: base, machine, pause, probe, containerd-shim-runc-v2, and
	// Kube.
	Dir string
	// Kube is the name of the Kubernetes program.
	Kube string
	// Runc is the directory of runc.
	Runc string
	// CNI is the directory of the CNI plugins.
	CNI string
}

// Program returns the path of a program in Dir.
func (p Programs) Program(name string) string { return filepath.Join(p.Dir, name) }

// prebuilt returns the directory of prebuilt programs, or "".
func (b Builder) prebuilt() string { return cmp.Or(b.Prebuilt, os.Getenv("CHANDLER_E2E_PROGRAMS")) }

// Cluster builds the programs of a cluster, and finds or installs the others.
func (b Builder) Cluster(ctx context.Context) (Programs, error) {
	runtime, err := b.findRuntime(ctx)
	if err != nil {
		return Programs{}, err
	}
	dir, err := b.base(ctx)
	if err != nil {
		return Programs{}, err
	}
	kube, err := b.kube(ctx, cmp.Or(b.Kubernetes, Version))
	if err != nil {
		return Programs{}, err
	}
	return Programs{Dir: dir, Kube: kube, Runc: filepath.Dir(runtime.runc), CNI: runtime.cni}, nil
}

// base builds clusterPackages, and returns the directory.
func (b Builder) base(ctx context.Context) (string, error) {
	dir := b.prebuilt()
	if dir == "" {
		return b.build(ctx, "etcd, containerd", b.module(), clusterPackages, stripped)
	}
	var names []string
	for _, pkg := range clusterPackages {
		names = append(names, filepath.Base(pkg))
	}
	return dir, exist(dir, names...)
}

// kube builds the program for a version of Kubernetes, and returns its name.
func (b Builder) kube(ctx context.Context, version string) (string, error) {
	folder, known := kubes[version]
	if !known {
		return "", fmt.Errorf("build Kubernetes %s: there is no program for it, but for %s", version, strings.Join(Versions(), ", "))
	}
	if dir := b.prebuilt(); dir != "" {
		return filepath.Base(folder), exist(dir, filepath.Base(folder))
	}
	root, err := b.root(ctx)
	if err != nil {
		return "", err
	}
	what := "kube-apiserver, kube-controller-manager, kube-scheduler, kubelet " + version
	_, err = b.build(ctx, what, filepath.Join(root, folder), []string{"."}, linkerFlags(version))
	return filepath.Base(folder), err
}

// DeviceManager builds the program with the kubelet's device manager, and returns its path.
func (b Builder) DeviceManager(ctx context.Context) (string, error) {
	version := cmp.Or(b.Kubernetes, Version)
	folder, known := managers[version]
	if !known {
		return "", fmt.Errorf("build the device manager of Kubernetes %s: there is no program for it, but for %s and %s", version, Classic, Version)
	}
	if dir := b.prebuilt(); dir != "" {
		return filepath.Join(dir, filepath.Base(folder)), exist(dir, filepath.Base(folder))
	}
	root, err := b.root(ctx)
	if err != nil {
		return "", err
	}
	dir, err := b.build(ctx, "the kubelet's device manager "+version, filepath.Join(root, folder), []string{"."}, linkerFlags(version))
	return filepath.Join(dir, filepath.Base(folder)), err
}

// Helm builds Helm, which has a module of its own, and returns its path.
func (b Builder) Helm(ctx context.Context) (string, error) {
	if dir := b.prebuilt(); dir != "" {
		return filepath.Join(dir, filepath.Base(helm)), exist(dir, filepath.Base(helm))
	}
	root, err := b.root(ctx)
	if err != nil {
		return "", err
	}
	dir, err := b.build(ctx, "Helm", filepath.Join(root, "helm"), []string{helm}, stripped)
	return filepath.Join(dir, filepath.Base(helm)), err
}

// helm is the package of Helm's program.
const helm = "helm.sh/helm/v4/cmd/helm"

// exist returns an error if a directory of prebuilt programs lacks any of the names.
func exist(dir string, names ...string) error {
	if _, err := findIn([]string{dir}, names...); err != nil {
		return fmt.Errorf("prebuilt programs: %w", err)
	}
	return nil
}

// root returns the directory of this module's go.mod.
func (b Builder) root(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "env", "GOMOD")
	cmd.Dir = b.module()
	gomod, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(string(gomod)), nil
}

// Static builds a package of the module in directory module as a static program, and returns
// its path. The program is in the directory of the cluster's programs, and is named by the
// last element of the package's path. flags are additional flags of go build.
func (b Builder) Static(ctx context.Context, module, pkg string, flags ...string) (string, error) {
	return b.static(ctx, module, pkg, stripped, flags...)
}

// Agent builds the agent of the Chandler checkout in directory project like its Makefile, and
// returns the program's path. The agent's version is the output of git describe, if available.
func (b Builder) Agent(ctx context.Context, project string) (string, error) {
	return b.versioned(ctx, project, "chandler.dev/cmd/chandler")
}

// Plugin builds the kubectl plugin of the Chandler checkout in directory project like Agent.
func (b Builder) Plugin(ctx context.Context, project string) (string, error) {
	return b.versioned(ctx, project, "chandler.dev/cmd/kubectl-chandler")
}

// versioned builds a program of a Chandler checkout with the version of the checkout.
func (b Builder) versioned(ctx context.Context, project, pkg string) (string, error) {
	linkerFlags := stripped
	describe := exec.CommandContext(ctx, "git", "describe", "--tags", "--always", "--dirty")
	describe.Dir = project
	if version, err := describe.Output(); err == nil {
		linkerFlags += " -X main.version=" + strings.TrimSpace(string(version))
	}
	return b.static(ctx, project, pkg, linkerFlags, "-tags=grpcnotrace")
}

// MockedNVML builds chandler-host of the Chandler checkout in directory project as a static
// program, with NVIDIA's mocks in place of NVML, and returns its path. It needs a C compiler.
// The program has a directory of its own, so that no agent on this machine finds it by
// accident.
func (b Builder) MockedNVML(ctx context.Context, project string) (string, error) {
	return b.nvml(ctx, project, "mocked", stripped+" -linkmode=external -extldflags=-static", "-tags=nvmlmock,netgo,osusergo")
}

// NVML builds chandler-host of the Chandler checkout in directory project like its Makefile, and
// returns its path. It needs a C compiler. The program has a directory of its own, like that of
// MockedNVML.
func (b Builder) NVML(ctx context.Context, project string) (string, error) {
	return b.nvml(ctx, project, "nvml", stripped)
}

// nvml builds chandler-host into a folder of the cache's directory of programs.
func (b Builder) nvml(ctx context.Context, project, folder, linkerFlags string, flags ...string) (string, error) {
	const name = "chandler-host"
	if dir := b.prebuilt(); dir != "" {
		dir = filepath.Join(dir, folder)
		return filepath.Join(dir, name), exist(dir, name)
	}
	bin, err := b.bin()
	if err != nil {
		return "", err
	}
	program := filepath.Join(bin, folder, name)
	b.env = []string{"CGO_ENABLED=1", "CGO_LDFLAGS=-Wl,-z,lazy", "CGO_CFLAGS=-O2 -Wno-deprecated-declarations"}
	_, err = b.build(ctx, name+" ("+folder+")", project, []string{"chandler.dev/cmd/chandler-host"},
		linkerFlags, append([]string{"-trimpath", "-o=" + program}, flags...)...)
	return program, err
}

func (b Builder) static(ctx context.Context, module, pkg, linkerFlags string, flags ...string) (string, error) {
	if dir := b.prebuilt(); dir != "" {
		return filepath.Join(dir, filepath.Base(pkg)), exist(dir, filepath.Base(pkg))
	}
	// Use the flags of the Makefile, so that both share Go's build cache.
	dir, err := b.build(ctx, pkg, module, []string{pkg}, linkerFlags, append([]string{"-trimpath"}, flags...)...)
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, filepath.Base(pkg)), nil
}

func (b Builder) module() string {
	if b.Module == "" {
		return "."
	}
	return b.Module
}

func (b Builder) bin() (string, error) {
	cache := b.Cache
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("cache directory: %w", err)
		}
		cache = filepath.Join(user, "chandler-e2e")
	}
	bin, err := filepath.Abs(filepath.Join(cache, "bin"))
	if err != nil {
		return "", err
	}
	return bin, os.MkdirAll(bin, 0o755)
}

// build runs go build, which writes only outdated programs. Builds into the same directory are
// serialized.
func (b Builder) build(ctx context.Context, what, module string, packages []string, linkerFlags string, flags ...string) (dir string, err error) {
	dir, err = b.bin()
	if err != nil {
		return "", err
	}
	unlock, err := Lock(ctx, filepath.Join(filepath.Dir(dir), "lock"))
	if err != nil {
		return "", fmt.Errorf("lock %s: %w", dir, err)
	}
	defer unlock()

	// Without the version control stamp, which would change every program with every commit.
	args := []string{"build", "-buildvcs=false", "-ldflags", linkerFlags, "-o", dir + string(filepath.Separator)}
	cmd := exec.CommandContext(ctx, "go", slices.Concat(args, flags, packages)...)
	cmd.Dir = module
	cmd.Env = slices.Concat(os.Environ(), []string{"CGO_ENABLED=0"}, b.env)
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stderr, &stderr
	if err := b.run(cmd, "building "+what); err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", what, err, strings.TrimSpace(stderr.String()))
	}
	return dir, nil
}

// stripped are linker flags to omit debugging information.
const stripped = "-s -w"

// linkerFlags returns linker flags with the version of Kubernetes, which clients require.
func linkerFlags(version string) string {
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	const pkg = "-X k8s.io/component-base/version."
	return strings.Join([]string{stripped, pkg + "gitVersion=" + version, pkg + "gitMajor=" + major, pkg + "gitMinor=" + minor}, " ")
}

// run runs a command and reports progress every ten seconds.
func (b Builder) run(cmd *exec.Cmd, doing string) error {
	const interval = 10 * time.Second
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			return err
		case now := <-tick.C:
			b.say("%s: %s so far", doing, now.Sub(begin).Round(time.Second))
		}
	}
}

func (b Builder) say(format string, args ...any) {
	if b.Progress != nil {
		fmt.Fprintf(b.Progress, format+"\n", args...)
	}
}

// Lock creates a file if missing, and waits for an exclusive lock on the file.
func Lock(ctx context.Context, path string) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = file.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(err, file.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), file.Close())
		case <-time.After(200 * time.Millisecond):
		}
	}
}
