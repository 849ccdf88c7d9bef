package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"chandler.dev/e2e/guest/debian"
)

// sources is the folder, in this module, with the tests' own kernel modules.
const sources = "guest/modules"

// HasCompiler reports whether this machine can build the modules in the folder modules.
func HasCompiler() bool {
	for _, program := range []string{"gcc", "make"} {
		if _, err := exec.LookPath(program); err != nil {
			return false
		}
	}
	return true
}

// buildModules builds the tests' own modules into lib/modules/RELEASE/extra in a directory, and
// returns the other modules.
func buildModules(ctx context.Context, dir string, kernel debian.Kernel, c Config, modules []string) (others []string, err error) {
	root, err := moduleRoot(ctx)
	if err != nil {
		return nil, err
	}
	for _, module := range modules {
		source := filepath.Join(root, sources, module)
		if _, err := os.Stat(source); err != nil {
			others = append(others, module)
			continue
		}
		to := filepath.Join(dir, "lib/modules", kernel.Release, "extra", module+".ko")
		if err := buildModule(ctx, source, to, kernel, c.Kernel); err != nil {
			return nil, fmt.Errorf("build module %s: %w", module, err)
		}
	}
	return others, nil
}

func buildModule(ctx context.Context, source, to string, kernel debian.Kernel, version Version) error {
	if !HasCompiler() {
		return errors.New("it needs gcc and make")
	}
	archive, err := archive()
	if err != nil {
		return err
	}
	headers, err := archive.Headers(ctx, version == Newer)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "chandler-module-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if err := os.CopyFS(work, os.DirFS(source)); err != nil {
		return err
	}
	// Debian's own compiler may have another version, which does not matter for modules as simple as
	// these.
	make := exec.CommandContext(ctx, "make", "-C", filepath.Join(headers, "usr/src/linux-headers-"+kernel.Release), "M="+work, "CC=gcc", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules") // BTF needs pahole
	if out, err := make.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	built, err := os.ReadFile(filepath.Join(work, filepath.Base(source)+".ko"))
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, built, 0o644))
}
