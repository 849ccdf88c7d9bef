package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/families/nvidia/userspace"
	"chandler.dev/discovery/families/nvidia/userspace/drivertest"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
)

// TestHooks runs images with the file system layout of Debian and of Red Hat with drivers of either
// layout. With the product's hooks, the images load and call the driver's libraries, also on a
// read-only root file system. Without hooks, the images cannot load the libraries. Containers get
// the files that the NVIDIA code for CDI specs lists.
func TestHooks(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("there is no C compiler: ", err)
	}
	if err := project.LoadCUDAImages(within(t), node.Node); err != nil {
		t.Fatal(err)
	}
	debian, rhel := driverFiles(t, drivertest.Debian), driverFiles(t, drivertest.RHEL)
	mounted := rhel
	mounted.Hooks = nil
	writeCDI(t, &specs.Spec{Version: "0.8.0", Kind: "e2e.example/library", Devices: []specs.Device{
		{Name: "mounted", ContainerEdits: mounted}, {Name: "debian", ContainerEdits: debian}, {Name: "rhel", ContainerEdits: rhel},
	}})
	for _, device := range []string{"mounted", "debian", "rhel"} {
		serveLibrary(t, device)
	}
	const fails, works = "libcuda.so.1: cannot open shared object file: No such file or directory", "all were called"
	for _, test := range []struct {
		image, device string
		readOnly      bool
		want          string
	}{
		{"debian", "mounted", false, fails},
		{"debian", "rhel", false, works},
		{"debian", "rhel", true, works},
		{"debian", "debian", false, works},
		{"rhel", "rhel", false, works},
		{"rhel", "debian", true, works},
	} {
		name := fmt.Sprintf("loads-%s-%s-%t", test.image, test.device, test.readOnly)
		pod := fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  restartPolicy: Never
  containers:
  - name: any
    image: localhost/loads-cuda-%s:1
    imagePullPolicy: Never
    securityContext: {readOnlyRootFilesystem: %t}
    resources: {limits: {e2e.example/%s: 1}}
`, name, test.image, test.readOnly, test.device)
		apply(t, pod)
		if _, err := kube.WaitForPod(within(t), metav1.NamespaceDefault, name, corev1.PodSucceeded); err != nil {
			t.Fatal(err)
		}
		logs, err := kube.Logs(within(t), metav1.NamespaceDefault, name, "")
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.TrimSpace(logs); got != test.want {
			t.Errorf("pod %s: %q; want %q", name, got, test.want)
		}
		remove(t, pod)
	}
}

// driverFiles returns a container's edits for a driver with its libraries in libraryDir, as the
// real program chandler-host finds them. The GPU's device nodes are left out, because this machine
// has none.
func driverFiles(t *testing.T, libraryDir string) specs.ContainerEdits {
	t.Helper()
	const driver = "/run/nvidia/driver"
	machine := t.TempDir()
	host, err := recorded.Parse([]byte(drivertest.RecordedHost("")))
	if err != nil {
		t.Fatal(err)
	}
	if err := host.WriteHost(machine); err != nil {
		t.Fatal(err)
	}
	drivertest.InstallDriver(t, machine+driver, libraryDir)
	run := exec.CommandContext(t.Context(), "go", "run", "-C", "..", "./cmd/chandler-host", "--files", "--host-root="+machine, "--driver-root="+driver)
	run.Env = append(os.Environ(), "CGO_ENABLED=1", "CGO_LDFLAGS=-Wl,-z,lazy", "CGO_CFLAGS=-O2 -g -Wno-deprecated-declarations")
	text, err := run.Output()
	if err != nil {
		t.Fatal(err)
	}
	files, err := hostfs.Open(machine)
	if err != nil {
		t.Fatal(err)
	}
	overlay := hostfs.NewOverlay(files)
	overlay.Set(strings.TrimPrefix(userspace.Path, "/"), text)
	snapshot := scan.ReadHost(&discovery.Host{FS: overlay, Roots: map[string]string{"nvidia": driver}, Hooks: project.Agent}, []*discovery.Family{nvidia.Family})
	if len(snapshot.Devices) != 1 {
		t.Fatalf("devices %v, problems %v", snapshot.Devices, snapshot.Problems)
	}
	edits := cdi.RebasePaths(snapshot.Devices[0].Edits, machine)
	edits.DeviceNodes = nil
	return edits
}

// libraryPlugin is a device plugin for one device of the test's own CDI spec.
type libraryPlugin struct {
	pluginapi.UnimplementedDevicePluginServer
	device string
	ended  <-chan struct{}
}

func (p *libraryPlugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (p *libraryPlugin) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: []*pluginapi.Device{{ID: p.device, Health: pluginapi.Healthy}}})
	<-p.ended
	return err
}

func (p *libraryPlugin) Allocate(context.Context, *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{
		{CdiDevices: []*pluginapi.CDIDevice{{Name: "e2e.example/library=" + p.device}}},
	}}, nil
}

// serveLibrary offers a device of the test's CDI spec as e2e.example/DEVICE until the test ends.
func serveLibrary(t *testing.T, device string) {
	t.Helper()
	dir := node.NodePath(pluginapi.DevicePluginPath)
	socket := "e2e-" + device + ".sock"
	listener, err := net.Listen("unix", filepath.Join(dir, socket))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, &libraryPlugin{device: device, ended: ended})
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() {
		close(ended)
		server.Stop()
		serving.Wait()
	})
	kubelet, err := grpc.NewClient("unix:"+filepath.Join(dir, filepath.Base(pluginapi.KubeletSocket)), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer kubelet.Close()
	request := &pluginapi.RegisterRequest{Version: pluginapi.Version, Endpoint: socket, ResourceName: "e2e.example/" + device}
	if _, err := pluginapi.NewRegistrationClient(kubelet).Register(within(t), request); err != nil {
		t.Fatal(err)
	}
}

// writeCDI writes a CDI spec on the node and removes it when the test ends.
func writeCDI(t *testing.T, spec *specs.Spec) {
	t.Helper()
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	file := node.NodePath("/var/run/cdi/e2e-hooks.json")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(file); err != nil {
			t.Error(err)
		}
	})
}
