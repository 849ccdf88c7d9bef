package informant

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/families/nvidia/userspace/drivertest"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/scan"
)

// made lays out a host with a GPU and a fake driver, and returns an informant with the real program
// and short time limits.
func made(t *testing.T) (n *Informant, host *discovery.Host, root string) {
	t.Helper()
	builtNVML = true
	program, err := buildNVML()
	if err != nil {
		t.Skipf("the program cannot be built: %v\n%s", err, program)
	}
	root = layOut(t, []byte(strings.Replace(nvmlHost, "-- dev/nvidia0", "-- sys/module/nvidia/version --\n"+drivertest.Version+"\n-- dev/nvidia0", 1)))
	drivertest.InstallDriver(t, filepath.Join(root, "run/driver"), drivertest.RHEL)
	files, err := hostfs.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	overlay := hostfs.NewOverlay(files)
	which := nvidia.Family.Programs[1]
	n = newInformant(*which, program, overlay, which.Args(root, "/run/driver"))
	n.interval, n.silence, n.retry, n.keep = 50*time.Millisecond, 10*time.Second, 50*time.Millisecond, 0
	return n, &discovery.Host{FS: overlay, Roots: map[string]string{"nvidia": "/run/driver"}}, root
}

// has reports whether a container with the GPU gets a file.
func has(t *testing.T, host *discovery.Host, name string) bool {
	t.Helper()
	return slices.ContainsFunc(gpuOf(t, host).Edits.Mounts, func(m *specs.Mount) bool { return m.ContainerPath == name })
}

// The next scan uses the answer of NVIDIA's code, and a change of the driver's files is detected.
// Before that, after a change of the driver, and without the program, the family finds the
// libraries itself.
func TestFiles(t *testing.T) {
	const icd, library = "/etc/OpenCL/vendors/nvidia.icd", "/usr/lib64/libcuda.so.1"
	n, host, root := made(t)
	if has(t, host, icd) || !has(t, host, library) {
		t.Error("before: it is not as the family finds it")
	}
	changed := start(t, n)
	within(t, changed, "nothing was heard")
	if !has(t, host, icd) || !has(t, host, library) {
		t.Error("after: it is not as NVIDIA's code says")
	}
	if err := os.Remove(filepath.Join(root, "run/driver/usr/bin/nvidia-imex")); err != nil {
		t.Fatal(err)
	}
	within(t, changed, "a change of the driver's files was not heard")
	if err := os.WriteFile(filepath.Join(root, "sys/module/nvidia/version"), []byte("580.1.2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	next := filepath.Join(root, "run/driver/usr/lib64/libcuda.so.580.1.2")
	if err := os.WriteFile(next, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if has(t, host, icd) || !has(t, host, "/usr/lib64/libcuda.so.580.1.2") {
		t.Error("another driver: it is not as the family finds it")
	}
}

// The host service gives the same answer as a program of the agent. Before, and without a service that
// runs the program, the family finds the libraries itself.
func TestFilesByHostService(t *testing.T) {
	const icd, library = "/etc/OpenCL/vendors/nvidia.icd", "/usr/lib64/libcuda.so.1"
	n, host, _ := made(t)
	n.args = slices.DeleteFunc(n.args, func(arg string) bool { return arg == "--files" })
	kill := hostService(t, n)()
	if err := n.runOnce(t.Context()); err == nil || !strings.Contains(err.Error(), `does not run program "driver-files"`) || has(t, host, icd) || !has(t, host, library) {
		t.Errorf("without the program: %v", err)
	}
	kill()
	n, host, _ = made(t)
	n.args = slices.DeleteFunc(n.args, func(arg string) bool { return arg == "--files" })
	startService := hostService(t, n, "--serve-files")
	changed := start(t, n)
	within(t, n.ready, "the first scan waits for the host service")
	if has(t, host, icd) || !has(t, host, library) {
		t.Error("without a service: it is not as the family finds it")
	}
	startService()
	within(t, changed, "no answer by the service")
	if !has(t, host, icd) || !has(t, host, library) {
		t.Error("it is not as NVIDIA's code returns it")
	}
}

// Without a driver below the root, the program reports an error, and the devices remain usable.
func TestFilesThatAreNotThere(t *testing.T) {
	n, host, _ := made(t)
	n.args = n.Args(t.TempDir(), "/run/driver")
	if err := n.runOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "libcuda.so") {
		t.Errorf("error %v", err)
	}
	if !has(t, host, "/usr/lib64/libcuda.so.1") {
		t.Error("it is not as the family finds it")
	}
	if snapshot := scan.ReadHost(host, families.All); len(snapshot.Problems) > 0 {
		t.Errorf("problems: %v", snapshot.Problems)
	}
}
