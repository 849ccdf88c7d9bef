package gpu

import (
	"cmp"
	"context"
	"debug/elf"
	_ "embed" // for vectorAdd
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
)

// vectorAdd is a CUDA program that computes on a GPU.
//
//go:embed vectoradd.cu
var vectorAdd []byte

// userImage is the image of pods that use a GPU: a shell, the C library of this machine, probe,
// mknod and, if nvcc is installed, vectoradd. It contains no file of the NVIDIA driver.
const userImage = "localhost/gpu-user:1"

// systemDirs are the directories of this machine's libraries, as the loader of either a Debian or a
// Red Hat system searches them.
var systemDirs = []string{
	"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64",
}

// driverNeeds are the libraries that the NVIDIA libraries and chandler-host require, as in the
// image of chandler-host.
var driverNeeds = []string{"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"}

// compileVectorAdd compiles vectorAdd in a directory, and returns the program's path, or "" if
// nvcc is not installed.
func compileVectorAdd(ctx context.Context, dir string) (string, error) {
	nvcc, err := exec.LookPath("nvcc")
	if err != nil {
		nvcc = "/usr/local/cuda/bin/nvcc"
	}
	if !exists(nvcc) {
		return "", nil
	}
	source, program := filepath.Join(dir, "vectoradd.cu"), filepath.Join(dir, "vectoradd")
	if err := os.WriteFile(source, vectorAdd, 0o644); err != nil {
		return "", err
	}
	if out, err := exec.CommandContext(ctx, nvcc, "-O2", "-cudart", "static", "-o", program, source).CombinedOutput(); err != nil {
		return "", fmt.Errorf("nvcc: %w\n%s", err, out)
	}
	return program, nil
}

// loadUserImage loads userImage. cuda is the path of vectoradd, or "".
func (in *installed) loadUserImage(ctx context.Context, cuda string) error {
	files := map[string]string{"/probe": in.project.Probe}
	programs := map[string]string{"/bin/sh": "/bin/sh", "/bin/mknod": "/usr/bin/mknod"}
	if cuda != "" {
		programs["/vectoradd"] = cuda
	}
	for target, source := range programs {
		files[target] = source
		if err := in.addNeeded(files, source); err != nil {
			return err
		}
	}
	if in.host.smi != "" { // nvidia-smi itself comes from the driver root
		if err := in.addNeeded(files, in.host.smi); err != nil {
			return err
		}
	}
	if err := in.addLibraries(files, driverNeeds); err != nil {
		return err
	}
	return in.node.LoadImage(ctx, cluster.Image{Name: userImage, Files: files, Entrypoint: []string{"/bin/sh", "-c"}})
}

// loadAgentImage loads the agent's image with chandler-host with the name in host-service.yaml.
func (in *installed) loadAgentImage(ctx context.Context, nvml string) error {
	files := map[string]string{"/chandler": in.project.Agent, "/chandler-host": nvml}
	if err := in.addNeeded(files, nvml); err != nil {
		return err
	}
	if err := in.addLibraries(files, driverNeeds); err != nil {
		return err
	}
	return in.node.LoadImage(ctx, cluster.Image{Name: chandler.AgentImage + "-host", Files: files, Entrypoint: []string{"/chandler"}})
}

// addNeeded adds the loader and the libraries of a program.
func (in *installed) addNeeded(files map[string]string, program string) error {
	file, err := elf.Open(program)
	if err != nil {
		return fmt.Errorf("%s: %w", program, err)
	}
	defer file.Close()
	for _, header := range file.Progs {
		if header.Type != elf.PT_INTERP {
			continue
		}
		name := make([]byte, header.Filesz)
		if _, err := header.ReadAt(name, 0); err != nil {
			return fmt.Errorf("%s: loader: %w", program, err)
		}
		loader := strings.TrimRight(string(name), "\x00")
		files[loader] = loader
	}
	needed, err := file.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("%s: libraries: %w", program, err)
	}
	return in.addLibraries(files, needed)
}

// addLibraries adds libraries of the system, and the libraries that these need. A library of the
// driver is an error.
func (in *installed) addLibraries(files map[string]string, names []string) error {
	for _, name := range names {
		path, err := in.systemLibrary(name)
		if err != nil {
			return err
		}
		if files[path] != "" {
			continue
		}
		files[path] = path
		if err := in.addNeeded(files, path); err != nil {
			return err
		}
	}
	return nil
}

func (in *installed) systemLibrary(name string) (string, error) {
	if strings.HasPrefix(name, "libcuda.so") || strings.HasPrefix(name, "libnvidia-") {
		return "", fmt.Errorf("%s is a library of the driver, which no image should contain", name)
	}
	for _, dir := range systemDirs {
		path := filepath.Join(dir, name)
		real, err := filepath.EvalSymlinks(path)
		if err != nil {
			continue
		}
		if root := cmp.Or(in.host.root, "/"); root != "/" && strings.HasPrefix(real, root+"/") {
			return "", fmt.Errorf("%s is a file of the driver, which no image should contain", real)
		}
		return path, nil
	}
	return "", fmt.Errorf("no %s in %s", name, strings.Join(systemDirs, ", "))
}
