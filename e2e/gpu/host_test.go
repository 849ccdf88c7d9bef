package gpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A host is this machine with its NVIDIA driver.
type host struct {
	root string // the driver's installation directory: "/" or, for example, "/usr/local/nvidia"
	smi  string // path of nvidia-smi
	gpus []gpu  // without GPUs in MIG mode
}

// A gpu is a GPU as nvidia-smi describes it.
type gpu struct {
	uuid, name, memoryMiB, driver, capability string

	address string // "0000:00:06.0"
	minor   string // of /dev/nvidia0, "0"
}

// driverRoots are the usual installation directories of the driver.
var driverRoots = []string{"/run/nvidia/driver", "/usr/local/nvidia", "/home/kubernetes/bin/nvidia", "/"}

// libraryDirs are the directories below a driver root for which the agent supports a driver.
var libraryDirs = []string{"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"}

// findHost describes this machine, and skips the test with the reason if the machine has no usable
// NVIDIA GPU.
func findHost(t *testing.T) host {
	t.Helper()
	if _, err := os.Stat("/proc/driver/nvidia/version"); err != nil {
		t.Skip("no NVIDIA driver is loaded: ", err)
	}
	h := host{root: *driverRoot}
	if h.root == "" {
		h.root = findRoot()
	}
	if h.root == "" {
		t.Skipf("there is no libcuda.so.1 below %s; the flag -driver-root sets another directory", strings.Join(driverRoots, ", "))
	}
	for _, dir := range []string{"usr/bin", "bin"} {
		if path := filepath.Join(h.root, dir, "nvidia-smi"); h.smi == "" && exists(path) {
			h.smi = path
		}
	}
	if h.smi == "" {
		t.Skip("there is no nvidia-smi below the driver root ", h.root)
	}
	for _, node := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm"} {
		if !exists(node) {
			t.Skipf("there is no %s: the driver is loaded, but not completely (run nvidia-modprobe -c0 -u)", node)
		}
	}
	var err error
	if h.gpus, err = h.query(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(h.gpus) == 0 {
		t.Skip("nvidia-smi lists no GPU without MIG mode")
	}
	return h
}

func findRoot() string {
	for _, root := range driverRoots {
		for _, dir := range libraryDirs {
			if exists(filepath.Join(root, dir, "libcuda.so.1")) {
				return root
			}
		}
	}
	return ""
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// query reads the GPUs from nvidia-smi.
func (h host) query(ctx context.Context) ([]gpu, error) {
	out, err := exec.CommandContext(ctx, h.smi, "--format=csv,noheader,nounits",
		"--query-gpu=uuid,name,memory.total,driver_version,compute_cap,pci.bus_id,mig.mode.current").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("nvidia-smi: %w\n%s", err, out)
	}
	var gpus []gpu
	for line := range strings.Lines(string(out)) {
		fields := strings.Split(strings.TrimSpace(line), ", ")
		if len(fields) != 7 {
			return nil, fmt.Errorf("nvidia-smi: unexpected line %q", line)
		}
		if fields[6] == "Enabled" {
			continue
		}
		g := gpu{uuid: fields[0], name: fields[1], memoryMiB: fields[2], driver: fields[3], capability: fields[4]}
		// The kernel's domains have four digits, those of nvidia-smi eight.
		g.address = strings.ToLower(strings.TrimPrefix(fields[5], "0000"))
		if g.minor, err = minorOf(g.address); err != nil {
			return nil, err
		}
		gpus = append(gpus, g)
	}
	return gpus, nil
}

// minorOf returns the minor number of a GPU's device node.
func minorOf(address string) (string, error) {
	text, err := os.ReadFile(filepath.Join("/proc/driver/nvidia/gpus", address, "information"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "Device Minor" {
			return strings.TrimSpace(value), nil
		}
	}
	return "", errors.New("no minor number of GPU " + address)
}

// nodes returns the device nodes of a container with one GPU.
func (g gpu) nodes() []string {
	nodes := []string{"/dev/nvidia" + g.minor, "/dev/nvidiactl"}
	for _, shared := range []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} {
		if exists(shared) {
			nodes = append(nodes, shared)
		}
	}
	return nodes
}
