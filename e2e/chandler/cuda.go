package chandler

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"chandler.dev/cdi/hook"
	"chandler.dev/e2e/cluster"
)

// loadsCUDA is a C program that loads NVIDIA libraries by their usual names, and calls them.
// It prints either an error or a success message.
const loadsCUDA = `
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
	const char *names[] = {"libcuda.so.1", "libcuda.so", "libGLX_indirect.so.0", "libnvidia-egl-gbm.so.1", "libvdpau_nvidia.so.1"};
	for (int i = 0; i < sizeof names / sizeof *names; i++) {
		void *library = dlopen(names[i], RTLD_NOW);
		int (*init)(unsigned) = library ? (int (*)(unsigned))dlsym(library, "cuInit") : 0;
		if (!init || init(0) != 0) { puts(dlerror()); return 0; }
	}
	puts("all were called");
	return 0;
}`

// CUDAImage returns the name of the image with the program loadsCUDA. shape is debian or rhel.
func CUDAImage(shape string) string { return "localhost/loads-cuda-" + shape + ":1" }

// LoadCUDAImages loads two images with loadsCUDA into the node: one with the C library in
// Debian's directory, and one with the C library in Red Hat's directory and a loader cache. It
// needs a C compiler.
func (p Project) LoadCUDAImages(ctx context.Context, n *cluster.Node) error {
	dir, err := os.MkdirTemp("", "loads-cuda-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	compiler := exec.CommandContext(ctx, "cc", "-x", "c", "-", "-o", dir+"/load", "-ldl")
	compiler.Stdin = strings.NewReader(loadsCUDA)
	if said, err := compiler.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", compiler, err, said)
	}
	needed, err := exec.CommandContext(ctx, "ldd", dir+"/load").Output()
	if err != nil {
		return fmt.Errorf("ldd: %w", err)
	}
	debian, rhel := map[string]string{"/load": dir + "/load"}, map[string]string{"/load": dir + "/load"}
	var cache hook.Cache
	for field := range strings.FieldsSeq(string(needed)) {
		name := filepath.Base(field)
		switch {
		case !filepath.IsAbs(field):
		case strings.HasPrefix(name, "ld-"):
			debian[field], rhel[field] = field, field
		default:
			debian[field], rhel["/usr/lib64/"+name] = field, field
			flags := map[string]uint32{"amd64": 0x0303, "arm64": 0x0a03}[runtime.GOARCH]
			cache.Add(hook.Library{Name: name, Path: "/usr/lib64/" + name, Flags: flags})
		}
	}
	rhel["/etc/ld.so.cache"] = dir + "/cache"
	if err := os.WriteFile(dir+"/cache", cache.Bytes(), 0o644); err != nil {
		return err
	}
	for shape, files := range map[string]map[string]string{"debian": debian, "rhel": rhel} {
		if err := n.LoadImage(ctx, cluster.Image{Name: CUDAImage(shape), Files: files, Entrypoint: []string{"/load"}}); err != nil {
			return err
		}
	}
	return nil
}
