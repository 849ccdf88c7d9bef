package informant

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/hostservice"
)

// mockedHost is a host with the GPU of the NVML mock.
var mockedHost = strings.NewReplacer(
	"0000:01:00.0", "0000:00:00.0", "GPU-5d2c1f01-8a41-4e0b-9c37-0b6f3d9ae401", "GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9a0000",
	"195 nvidia\n", "195 nvidia\n506 nvidia-caps\n",
).Replace(nvmlHost)

// mocked lays the host out, and returns an informant with the real program and NVIDIA's mock of
// NVML.
func mocked(t *testing.T) (*Informant, *discovery.Host) {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("there is no C compiler to build the program with")
	}
	if os.Getuid() != 0 {
		t.Skip("needs root, to make device nodes")
	}
	program := filepath.Join(t.TempDir(), "chandler-host")
	cmd := exec.Command("go", "build", "-tags", "nvmlmock", "-o", program, "../../chandler-host")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1", "CGO_LDFLAGS=-Wl,-z,lazy")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	root := layOut(t, []byte(mockedHost))
	hostFS, err := hostfs.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	overlay := hostfs.NewOverlay(hostFS)
	p := *nvidia.Family.Programs[0]
	return newInformant(p, program, overlay, p.Args(root, "")), &discovery.Host{
		FS: overlay, Partitionings: []discovery.Selection[struct{}]{{Selects: func(discovery.Device) (bool, error) { return true, nil }}},
	}
}

// Program, informant and family work together, also through a host service: an instance of NVML is
// described, a requested one is created and found at once, and a removed one is gone.
func TestMIGPartitions(t *testing.T) {
	n, host := mocked(t)
	t.Run("child", func(t *testing.T) { createInstance(t, n, host) })
	n, host = n.again(), &discovery.Host{FS: host.FS, Partitionings: host.Partitionings}
	hostService(t, n, "--serve-nvml")()
	t.Run("host service", func(t *testing.T) { createInstance(t, n, host) })
}

// again returns an informant with the same program.
func (n *Informant) again() *Informant {
	n.set(nil)
	return newInformant(n.Program, n.path, n.host, n.args)
}

func createInstance(t *testing.T, n *Informant, host *discovery.Host) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	changed := make(chan struct{}, 1)
	go func() {
		defer close(ended)
		n.Run(ctx, func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
	}()
	defer func() { cancel(); <-ended }()
	const name = "pci-0000-00-00-0-mig-2g-20gb-at-4"
	until := func(what string, so func(d discovery.Device) bool) discovery.Device {
		t.Helper()
		limit := time.After(time.Minute)
		for {
			if d, found := scan.ReadHost(host, []*discovery.Family{nvidia.Family}).Lookup(name); found && so(d) {
				return d
			}
			select {
			case <-changed:
			case <-time.After(time.Second):
			case <-limit:
				t.Fatalf("%s: never", what)
			}
		}
	}
	free := until("it could be created", func(d discovery.Device) bool { return d.Creation != nil && d.Health.Status == discovery.Healthy })
	change := func(work discovery.Work, err error) {
		t.Helper()
		if err == nil {
			lease := hostservice.Lease{Name: "test", Function: discovery.FunctionKey(host, "sys/bus/pci/devices/0000:00:00.0")}
			err = work(hostservice.WithLease(t.Context(), lease))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	tools := discovery.Tools{
		ChangePartition: n.ChangePartition, AmendRecord: func(string, map[string]string) error { return nil }, RemoveRecord: func(string) error { return nil },
	}
	began := time.Now()
	change(nvidia.Family.Create(host, tools, *free.Creation))
	made := until("it is there", func(d discovery.Device) bool { return d.Creation == nil && d.Health.Status == discovery.Healthy })
	if !strings.HasPrefix(made.Identity, "MIG-") || made.Attributes.String("profile") != "2g.20gb" || time.Since(began) > n.interval/2 {
		t.Errorf("after %s it is %+v", time.Since(began), made)
	}
	change(nvidia.Family.Remove(host, tools, *free.Creation))
	until("it is gone", func(d discovery.Device) bool { return d.Creation != nil })
}
