package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// A program is a built program.
type program struct {
	name, arch string
	path       string
}

// platforms are the platforms of a release, all with Linux.
var platforms = []string{"amd64", "arm64"}

// compilers are the cross compilers for C, by platform, with Debian's names.
var compilers = map[string]string{"amd64": "x86_64-linux-gnu-gcc", "arm64": "aarch64-linux-gnu-gcc"}

// agent builds the agent for a platform, once.
func (r *release) agent(ctx context.Context, arch string) (program, error) {
	return r.pure(ctx, "chandler", arch)
}

// plugin builds the kubectl plugin for a platform, once.
func (r *release) plugin(ctx context.Context, arch string) (program, error) {
	return r.pure(ctx, "kubectl-chandler", arch)
}

// pure builds a program without cgo, with the release's version.
func (r *release) pure(ctx context.Context, name, arch string) (program, error) {
	return r.build(ctx, name, arch, []string{"CGO_ENABLED=0"},
		"-tags=grpcnotrace", "-ldflags=-s -w -buildid= -X main.version="+r.version)
}

// informant builds chandler-host for a platform, once. NVML functions are bound lazily, since
// older libraries lack some of them.
func (r *release) informant(ctx context.Context, arch, compiler string) (program, error) {
	return r.build(ctx, "chandler-host", arch, []string{"CGO_ENABLED=1", "CC=" + compiler, "CGO_LDFLAGS=-Wl,-z,lazy", "CGO_CFLAGS=-O2 -Wno-deprecated-declarations"},
		"-ldflags=-s -w -buildid= -X main.version="+r.version)
}

// build builds a program. Build settings in the user's environment must not change the result.
func (r *release) build(ctx context.Context, name, arch string, env []string, flags ...string) (program, error) {
	p := program{name: name, arch: arch, path: filepath.Join(r.out, fmt.Sprintf("%s-%s-linux-%s", name, r.version, arch))}
	if slices.Contains(r.built, p) {
		return p, nil
	}
	r.say("building %s for linux/%s", name, arch)
	args := slices.Concat([]string{"build", "-trimpath", "-buildvcs=false", "-o", p.path}, flags, []string{"./cmd/" + name})
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = r.source
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off", "GOEXPERIMENT=", "GOFIPS140=off", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0")
	cmd.Env = append(cmd.Env, env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return p, fmt.Errorf("build %s for linux/%s: %w\n%s", name, arch, err, bytes.TrimSpace(out))
	}
	r.built = append(r.built, p)
	return p, nil
}

// programs builds the programs that are released as files, and the archives of the kubectl plugin.
func (r *release) programs(ctx context.Context) error {
	for _, arch := range r.platforms {
		if _, err := r.agent(ctx, arch); err != nil {
			return err
		}
		plugin, err := r.plugin(ctx, arch)
		if err != nil {
			return err
		}
		if err := r.pluginArchive(plugin); err != nil {
			return err
		}
	}
	return nil
}

// compilerFor returns the C compiler for a platform, or "" if this machine has none.
func compilerFor(arch string) string {
	name := compilers[arch]
	if arch == runtime.GOARCH {
		name = cmp.Or(os.Getenv("CC"), "gcc")
	}
	if _, err := exec.LookPath(strings.Fields(name)[0]); err != nil {
		return ""
	}
	return name
}
