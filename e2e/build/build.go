// Package build builds and finds the programs that a cluster on one machine is made of. Where it builds it leans on
// Go's build cache, so that a second call takes seconds; it runs none of the programs.
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

// Versions of Kubernetes that can be built.
const (
	Version = "v1.37.0" // by go.mod
	Oldest  = "v1.34.4" // by kube-1.34/go.mod: of the first minor version that has resource.k8s.io/v1
	Classic = "v1.31.0" // by kube-1.31/go.mod: its API server serves no resource.k8s.io unless it is switched on
)

// kubes are the folders of this module in which there is a program that is Kubernetes, by version.
var kubes = map[string]string{
	Version: "cmd/kube",
	Oldest:  "kube-1.34", // a module of its own
	Classic: "kube-1.31", // likewise
}

// managers are the folders in which there is a program that is the device manager of a kubelet, by version.
var managers = map[string]string{
	Version: "cmd/devicemanager",
	Classic: "kube-1.31/devicemanager-1.31",
}

// Versions returns the versions of Kubernetes that can be built, the oldest first.
func Versions() []string { return slices.Sorted(maps.Keys(kubes)) }

// clusterPackages are those of every cluster, built into one directory, each a program with the last element of its
// path as name.
var clusterPackages = []string{
	"chandler.dev/e2e/cmd/base",
	"chandler.dev/e2e/cmd/machine",
	"chandler.dev/e2e/cmd/pause",
	"chandler.dev/e2e/cmd/probe",
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
}

// A Builder builds into a cache directory. Its zero value is ready to use.
type Builder struct {
	// Kubernetes is the version of Kubernetes that Cluster builds, one of Versions; Version unless given.
	Kubernetes string
	// Cache is chandler-e2e in the user's cache directory unless given. The programs go to its folder bin.
	Cache string
	// Module is the directory of this module; the current directory unless given, which may be any in the module.
	Module string
	// Progress is told what takes time; nothing is written if it is nil.
	Progress io.Writer

	env []string // of go build, besides the builder's own
}

// Programs are all that a cluster needs of the host.
type Programs struct {
	// Dir holds what was built: base, machine, pause, probe, containerd-shim-runc-v2, and Kube.
	Dir string
	// Kube is the name of the program that is Kubernetes.
	Kube string
	// Runc is the directory that runc lies in.
	Runc string
	// CNI is the directory of the CNI plugins.
	CNI string
}

// Program is the path of one of the programs in Dir.
func (p Programs) Program(name string) string { return filepath.Join(p.Dir, name) }

// Cluster builds the programs of a cluster and finds, or installs, the others.
func (b Builder) Cluster(ctx context.Context) (Programs, error) {
	runtime, err := b.findRuntime(ctx)
	if err != nil {
		return Programs{}, err
	}
	dir, err := b.build(ctx, "etcd, containerd", b.module(), clusterPackages, stripped)
	if err != nil {
		return Programs{}, err
	}
	kube, err := b.kube(ctx, cmp.Or(b.Kubernetes, Version))
	if err != nil {
		return Programs{}, err
	}
	return Programs{Dir: dir, Kube: kube, Runc: filepath.Dir(runtime.runc), CNI: runtime.cni}, nil
}

// kube builds the program that is a version of Kubernetes, and returns its name.
func (b Builder) kube(ctx context.Context, version string) (string, error) {
	folder, known := kubes[version]
	if !known {
		return "", fmt.Errorf("build Kubernetes %s: there is no program for it, but for %s", version, strings.Join(Versions(), ", "))
	}
	root, err := b.root(ctx)
	if err != nil {
		return "", err
	}
	what := "kube-apiserver, kube-controller-manager, kube-scheduler, kubelet " + version
	_, err = b.build(ctx, what, filepath.Join(root, folder), []string{"."}, linkerFlags(version))
	return filepath.Base(folder), err
}

// DeviceManager builds the program that is the device manager of Kubernetes' kubelet, and returns its path.
func (b Builder) DeviceManager(ctx context.Context) (string, error) {
	version := cmp.Or(b.Kubernetes, Version)
	folder, known := managers[version]
	if !known {
		return "", fmt.Errorf("build the device manager of Kubernetes %s: there is no program for it, but for %s and %s", version, Classic, Version)
	}
	root, err := b.root(ctx)
	if err != nil {
		return "", err
	}
	dir, err := b.build(ctx, "the kubelet's device manager "+version, filepath.Join(root, folder), []string{"."}, linkerFlags(version))
	return filepath.Join(dir, filepath.Base(folder)), err
}

// Helm builds Helm, which is in a module of its own, and returns its path.
func (b Builder) Helm(ctx context.Context) (string, error) {
	root, err := b.root(ctx)
	if err != nil {
		return "", err
	}
	dir, err := b.build(ctx, "Helm", filepath.Join(root, "helm"), []string{helm}, stripped)
	return filepath.Join(dir, filepath.Base(helm)), err
}

// helm is the package that is Helm.
const helm = "helm.sh/helm/v4/cmd/helm"

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

// Static builds a package of the module in directory module as a static program, and returns its path. It lies beside
// the cluster's programs, named by the last element of the package's path. Further flags are those of go build.
func (b Builder) Static(ctx context.Context, module, pkg string, flags ...string) (string, error) {
	return b.static(ctx, module, pkg, stripped, flags...)
}

// Agent builds the agent of the checkout of Chandler in directory project as its Makefile does, and returns its path. The
// agent says the version that git does, if the checkout is git's.
func (b Builder) Agent(ctx context.Context, project string) (string, error) {
	linkerFlags := stripped
	describe := exec.CommandContext(ctx, "git", "describe", "--tags", "--always", "--dirty")
	describe.Dir = project
	if version, err := describe.Output(); err == nil {
		linkerFlags += " -X main.version=" + strings.TrimSpace(string(version))
	}
	return b.static(ctx, project, "chandler.dev/cmd/chandler", linkerFlags, "-tags=grpcnotrace")
}

// MockedNVML builds chandler-nvml of the checkout of Chandler in directory project, with NVIDIA's mocks in place of NVML, as
// a static program, and returns its path. It needs a C compiler. It lies apart, so that no agent on this machine finds it
// beside itself.
func (b Builder) MockedNVML(ctx context.Context, project string) (string, error) {
	bin, err := b.bin()
	if err != nil {
		return "", err
	}
	program := filepath.Join(bin, "mocked", "chandler-nvml")
	b.env = []string{"CGO_ENABLED=1", "CGO_LDFLAGS=-Wl,-z,lazy"}
	_, err = b.build(ctx, "chandler-nvml with NVIDIA's mocks", project, []string{"chandler.dev/cmd/chandler-nvml"},
		stripped+" -linkmode=external -extldflags=-static", "-trimpath", "-tags=nvmlmock,netgo,osusergo", "-o="+program)
	return program, err
}

func (b Builder) static(ctx context.Context, module, pkg, linkerFlags string, flags ...string) (string, error) {
	// As the Makefile does, so that the one finds in Go's cache what the other built.
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

// build runs go build, which writes only those programs that are not up to date. Builds into the same directory take
// turns.
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

	// Without version control's stamp, which would make every program new with every commit.
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

// stripped are linker flags that leave debugging information out.
const stripped = "-s -w"

// linkerFlags tell Kubernetes its version, without which clients refuse it.
func linkerFlags(version string) string {
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	const pkg = "-X k8s.io/component-base/version."
	return strings.Join([]string{stripped, pkg + "gitVersion=" + version, pkg + "gitMajor=" + major, pkg + "gitMinor=" + minor}, " ")
}

// run runs a command and tells every now and then that it still does.
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

// Lock takes a file's lock, waiting for others to let it go. The file is made if it is not there.
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
