package informant

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/families/nvidia/userspace"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/hostservice"
)

// hostService starts the real program as a host service with the arguments of an informant, and
// makes the service run the program for the informant. The informant itself has no program.
func hostService(t *testing.T, n *Informant, flags ...string) (start func() (kill func())) {
	t.Helper()
	dir, path := t.TempDir(), n.path
	args := append([]string{"--host-service=" + dir, "--interval=" + n.interval.String()}, append(n.args, flags...)...)
	n.path, n.args, n.service = "/nowhere", nil, hostservice.NewClient(dir, nil)
	return func() func() {
		t.Helper()
		cmd := exec.Command(path, args...)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		kill := func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
		t.Cleanup(kill)
		for limit := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			_, err := n.service.DescribeService(t.Context())
			if err == nil {
				return kill
			}
			if time.Now().After(limit) {
				t.Fatal(err)
			}
		}
	}
}

// until waits for the GPU of a scan to satisfy a condition.
func until(t *testing.T, host *discovery.Host, what string, condition func(gpu discovery.Device) bool) {
	t.Helper()
	for limit := time.Now().Add(30 * time.Second); !condition(gpuOf(t, host)); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("%s: never; %+v", what, gpuOf(t, host))
		}
	}
}

func hasFacts(gpu discovery.Device) bool {
	return gpu.Attributes.String("architecture") == "hopper" && gpu.Health.Status == discovery.Healthy
}

// The host service provides the same facts as a program of the agent. While it is missing, the GPU
// is described without them, or with the last ones and a reason that names the service. The next
// service provides them again.
func TestNVMLByHostService(t *testing.T) {
	n, host := standIn(t)
	startService := hostService(t, n, "--serve-nvml")
	start(t, n)
	within(t, n.ready, "the first scan waits for the host service")
	if gpu := gpuOf(t, host); gpu.Attributes.String("architecture") != "" || gpu.Health.Status != discovery.Healthy {
		t.Errorf("without a service: %+v", gpu)
	}
	kill := startService()
	until(t, host, "facts", hasFacts)
	kill()
	until(t, host, "loss", func(gpu discovery.Device) bool { return !hasFacts(gpu) })
	_, err := facts.Parse(readAnswer(t, n))
	if err == nil || !strings.Contains(err.Error(), "the host service does not answer at ") {
		t.Errorf("lost: %v", err)
	}
	startService()
	until(t, host, "facts of the next service", hasFacts)
}

// A request for a scan reaches the program through the service.
func TestRequestedScanByHostService(t *testing.T) {
	n, _ := standIn(t)
	n.interval = time.Hour
	hostService(t, n, "--serve-nvml")()
	answers, enough := 0, errors.New("enough")
	err := n.runSession(t.Context(), func([]byte) error {
		if answers++; answers == 3 {
			return enough
		}
		n.requestScan()
		return nil
	})
	if !errors.Is(err, enough) {
		t.Errorf("%d answers, %v", answers, err)
	}
}

// readAnswer returns the text that the family reads.
func readAnswer(t *testing.T, n *Informant) string {
	t.Helper()
	text, err := (&discovery.Host{FS: n.host}).ReadText(n.File)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// The program's own error arrives through the service, and a service without the program is named.
func TestNVMLByHostServiceFails(t *testing.T) {
	n, _ := standIn(t, "-DLACKS")
	hostService(t, n, "--serve-nvml")()
	if err := n.runOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "it ended: exit status 127: ") || !strings.Contains(err.Error(), "nvmlDeviceGetHandleByPciBusId") {
		t.Errorf("error %v", err)
	}
	n, _ = standIn(t)
	hostService(t, n)()
	if err := n.runOnce(t.Context()); err == nil || !strings.Contains(err.Error(), `does not run program "nvml"`) || errors.Is(err, hostservice.ErrAway) {
		t.Errorf("error %v", err)
	}
}

// A program that hangs in NVML is ended by the service when the agent gives up.
func TestNVMLByHostServiceHangs(t *testing.T) {
	n, _ := standIn(t, "-DHANG")
	hostService(t, n, "--serve-nvml")()
	n.silence = 500 * time.Millisecond
	for range 3 {
		if err := n.runOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "silent for 500ms") {
			t.Errorf("error %v", err)
		}
	}
}

// A line that is too long ends the program, which would otherwise wait for its output to be read.
func TestLineTooLong(t *testing.T) {
	n := changer(t, "head -c 1000000 /dev/zero; exec sleep 3600")
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	err := n.runSession(ctx, func([]byte) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "token too long") {
		t.Errorf("error %v", err)
	}
}

// With a host service, the agent needs no program beside it, and runs none.
func TestOverlayInformantsOfHostService(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	hostFS, err := hostfs.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	host := &discovery.Host{FS: hostFS, Roots: map[string]string{"nvidia": "/run/driver"}}
	service := hostservice.NewClient(t.TempDir(), nil)
	informants := OverlayInformants(host, families.All, "/host", service)
	if len(informants) != 2 || informants[0].service != service || informants[0].File != facts.Path || informants[1].service != service || informants[1].File != userspace.Path {
		t.Errorf("got %+v", informants)
	}
	if err := os.WriteFile(filepath.Join(os.Getenv("PATH"), nvidia.Family.Programs[0].Name), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, service := range []*hostservice.Client{service, nil} {
		host.FS = hostFS
		informants = OverlayInformants(host, families.All, "/host", service)
		for _, n := range informants {
			if n.service != service || service == nil && !filepath.IsAbs(n.path) {
				t.Errorf("with a program: %+v", n)
			}
		}
		if len(informants) != 2 {
			t.Errorf("with a program: %d informants", len(informants))
		}
	}
}
