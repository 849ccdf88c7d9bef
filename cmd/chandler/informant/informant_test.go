package informant

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
)

// nvmlHost is a host with one NVIDIA GPU.
const nvmlHost = `One GPU.

-- proc/devices --
Character devices:
195 nvidia
-- proc/driver/nvidia/gpus/0000:01:00.0/information --
Model: NVIDIA Stand-In
GPU UUID: GPU-5d2c1f01-8a41-4e0b-9c37-0b6f3d9ae401
Device Minor: 0
-- sys/bus/pci/devices/0000:01:00.0 -> ../../../devices/pci0000:00/0000:01:00.0 --
-- sys/devices/pci0000:00/0000:01:00.0/vendor --
0x10de
-- sys/devices/pci0000:00/0000:01:00.0/device --
0x2330
-- sys/devices/pci0000:00/0000:01:00.0/class --
0x030200
-- sys/devices/pci0000:00/0000:01:00.0/driver -> ../../../bus/pci/drivers/nvidia --
-- dev/nvidia0 c 195:0 --
-- dev/nvidiactl c 195:255 --
-- end --
`

// buildNVML builds the program once for all tests.
var buildNVML = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "chandler-host-")
	if err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-o", dir, "../../chandler-host")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1", "CGO_LDFLAGS=-Wl,-z,lazy")
	if out, err := cmd.CombinedOutput(); err != nil {
		return string(out), err
	}
	return filepath.Join(dir, nvidia.Family.Programs[0].Name), nil
})

func TestMain(m *testing.M) {
	m.Run()
	if !builtNVML {
		return // buildNVML would build the program
	}
	if program, err := buildNVML(); err == nil {
		os.RemoveAll(filepath.Dir(program))
	}
}

var builtNVML bool

// standIn lays out the host with a fake library, compiled with the given macros. It returns an
// informant with the real program and short time limits.
func standIn(t *testing.T, defines ...string) (*Informant, *discovery.Host) {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("there is no gcc to compile a stand-in for NVML with")
	}
	builtNVML = true
	program, err := buildNVML()
	if err != nil {
		t.Fatalf("build: %v\n%s", err, program)
	}
	root := layOut(t, []byte(nvmlHost))
	lib := filepath.Join(root, "run/driver/usr/lib64")
	if err := os.MkdirAll(lib, 0o755); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"-shared", "-fPIC", "-o", filepath.Join(lib, "libnvidia-ml.so.1"), "testdata/nvml.c"}, defines...)
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	hostFS, err := hostfs.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	overlay := hostfs.NewOverlay(hostFS)
	n := newInformant(*nvidia.Family.Programs[0], program, overlay, nvidia.Family.Programs[0].Args(root, "/run/driver"))
	n.interval, n.silence, n.retry, n.keep = 50*time.Millisecond, 10*time.Second, 50*time.Millisecond, 0
	return n, &discovery.Host{FS: overlay}
}

func parse(t *testing.T, data []byte) *recorded.Host {
	t.Helper()
	host, err := recorded.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	return host
}

// layOut lays out a recorded host as a directory.
func layOut(t *testing.T, data []byte) (root string) {
	t.Helper()
	root = t.TempDir()
	if err := parse(t, data).WriteHost(root); err != nil {
		t.Fatal(err)
	}
	return root
}

// gpuOf returns the GPU of a scan.
func gpuOf(t *testing.T, host *discovery.Host) discovery.Device {
	t.Helper()
	snapshot := scan.ReadHost(host, families.All)
	gpu, ok := snapshot.Lookup("pci-0000-01-00-0")
	if !ok {
		t.Fatalf("no GPU: %v", snapshot.Problems)
	}
	return gpu
}

// start runs the program until the test ends, and checks that it exits.
func start(t *testing.T, n *Informant) (changed <-chan struct{}) {
	t.Helper()
	changes := make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		n.Run(ctx, func() {
			select {
			case changes <- struct{}{}:
			default:
			}
		})
		close(ended)
	}()
	t.Cleanup(func() {
		cancel()
		within(t, ended, "run has not ended")
	})
	return changes
}

func within(t *testing.T, c <-chan struct{}, otherwise string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(30 * time.Second):
		t.Fatal(otherwise)
	}
}

// The next scan has NVML's facts, even from an old library with few functions.
func TestNVML(t *testing.T) {
	n, host := standIn(t)
	if gpu := gpuOf(t, host); gpu.Attributes.String("architecture") != "" || gpu.Health.Status != discovery.Healthy {
		t.Errorf("before: %+v", gpu)
	}
	changed := start(t, n)
	within(t, changed, "nothing was heard")
	within(t, n.ready, "the first scan is kept waiting")
	gpu := gpuOf(t, host)
	memory := gpu.Capacity["memory"].Value
	if gpu.Attributes.String("architecture") != "hopper" || memory.Value() != 1<<34 || gpu.Health.Status != discovery.Healthy {
		t.Errorf("after: %+v", gpu)
	}
}

// NVML's facts are recorded with the host, and are found again in the recording.
func TestNVMLOnce(t *testing.T) {
	n, host := standIn(t)
	if err := n.runOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	if gpu := gpuOf(t, host); gpu.Attributes.String("architecture") != "hopper" {
		t.Errorf("got %+v", gpu)
	}
	data, err := recorded.RecordHost(host, families.All, "")
	if err != nil {
		t.Fatal(err)
	}
	root := layOut(t, data)
	if gpu := gpuOf(t, &discovery.Host{FS: os.DirFS(root)}); gpu.Attributes.String("architecture") != "hopper" {
		t.Errorf("as it was recorded: %+v", gpu)
	}
}

// A broken library does not affect the host, and delays the first scan only briefly.
func TestNVMLThatIsOfNoUse(t *testing.T) {
	for name, test := range map[string]struct{ define, want string }{
		"hangs":   {"-DHANG", "silent for 1s"},
		"crashes": {"-DCRASH", "it ended: exit status 2: SIGSEGV"},
		"lacks":   {"-DLACKS", "nvmlDeviceGetHandleByPciBusId"},
	} {
		t.Run(name, func(t *testing.T) {
			n, host := standIn(t, test.define)
			if test.define == "-DHANG" {
				n.silence = time.Second
			}
			err := n.runOnce(t.Context())
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q in it", err, test.want)
			}
			start(t, n)
			within(t, n.ready, "the first scan is kept waiting")
			if gpu := gpuOf(t, host); gpu.Health.Status != discovery.Healthy || len(gpu.PluginOffers) == 0 {
				t.Errorf("the GPU suffers: %+v", gpu)
			}
		})
	}
}

// Without NVML, the program reports an error.
func TestNVMLThatIsNotThere(t *testing.T) {
	n, host := standIn(t)
	n.args = n.Args(t.TempDir(), "")
	if err := n.runOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "libnvidia-ml.so.1") {
		t.Errorf("error %v", err)
	}
	if gpu := gpuOf(t, host); gpu.Health.Status != discovery.Healthy {
		t.Errorf("the GPU suffers: %+v", gpu)
	}
	n.path = filepath.Join(t.TempDir(), "missing")
	if err := n.runOnce(t.Context()); err == nil {
		t.Error("a program that is not there gave an answer")
	}
}

// When NVML stops answering, its last facts remain, and the GPU's health becomes unknown.
func TestNVMLThatTires(t *testing.T) {
	n, host := standIn(t, "-DTIRES")
	n.silence, n.retry = 2*time.Second, time.Hour
	changed := start(t, n)
	within(t, changed, "nothing was heard")
	first := scan.RescanHost(host, families.All, nil)
	if gpu := gpuOf(t, host); gpu.Attributes.String("architecture") != "hopper" {
		t.Fatalf("got %+v", gpu)
	}
	within(t, changed, "nothing was taken back")
	merged := scan.RescanHost(host, families.All, first).Snapshot()
	gpu, _ := merged.Lookup("pci-0000-01-00-0")
	if gpu.Health.Status != discovery.Unknown || !strings.Contains(gpu.Health.Reason, "silent for 2s") || gpu.Attributes.String("architecture") != "hopper" {
		t.Errorf("got %+v", gpu)
	}
}

// Only this machine has informants, and only without an existing answer.
func TestOverlayInformants(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, nvidia.Family.Programs[0].Name), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	hostFS, err := hostfs.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	answered := hostfs.NewOverlay(hostFS)
	for _, program := range nvidia.Family.Programs {
		answered.Set(program.File[1:], []byte("{}"))
	}
	stranger := "-- proc/sys/kernel/random/boot_id --\n" + string(bootID) + "-- proc/driver/nvidia/ --\n-- end --\n"
	copied, err := hostfs.Open(layOut(t, []byte(stranger)))
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		path string
		host fs.FS
		want bool
	}{
		"this machine":              {dir, hostFS, true},
		"a copy with its boot ID":   {dir, copied, false},
		"without a program":         {t.TempDir(), hostFS, false},
		"answered already":          {dir, answered, false},
		"a recorded one, in memory": {dir, parse(t, []byte(stranger)).FS(), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("PATH", test.path)
			host := &discovery.Host{FS: test.host, Roots: map[string]string{"nvidia": "/run/driver"}}
			informants := OverlayInformants(host, families.All, "/host", nil)
			if _, overlaid := host.FS.(*hostfs.Overlay); (len(informants) == 2) != test.want || test.want != overlaid && test.host != fs.FS(answered) {
				t.Fatalf("got %+v, host %T", informants, host.FS)
			}
			want := []string{"--host-root=/host", "--driver-root=/run/driver", "--gpus=/host/proc/driver/nvidia/gpus"}
			if test.want && !slices.Equal(informants[0].args, want) {
				t.Errorf("arguments %q", informants[0].args)
			}
			host = &discovery.Host{FS: test.host}
			if informants := OverlayInformants(host, families.All, "/host", nil); (len(informants) == 1) != test.want {
				t.Errorf("without a root: %+v", informants)
			}
		})
	}
}
