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

	"chandler.dev/e2e/cluster"
)

// loadsCUDA is a program that loads libcuda.so.1 as programs of CUDA do, and says what answers.
const loadsCUDA = `
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	puts(library ? ((const char *(*)(void))dlsym(library, "who"))() : dlerror());
	return 0;
}`

// An image of Debian's loads a library that is mounted where Red Hat has libraries, since the
// runtime calls our hooks; without them it does not. Its root file system may be read-only.
func TestHooks(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("there is no C compiler: ", err)
	}
	dir := t.TempDir()
	compile(t, loadsCUDA, "-o", dir+"/load", "-ldl")
	compile(t, `const char *who(void) { return "the host's library"; }`, "-o", dir+"/libcuda.so.570.124.06", "-shared", "-Wl,-soname,libcuda.so.1")
	image := cluster.Image{Name: "localhost/loads-cuda:1", Files: map[string]string{"/load": dir + "/load"}, Entrypoint: []string{"/load"}}
	needed, err := exec.CommandContext(t.Context(), "ldd", dir+"/load").Output()
	if err != nil {
		t.Fatal(err)
	}
	for field := range strings.FieldsSeq(string(needed)) {
		if filepath.IsAbs(field) {
			image.Files[field] = field
		}
	}
	if err := node.LoadImage(within(t), image); err != nil {
		t.Fatal(err)
	}
	hook := func(name string, args ...string) *specs.Hook {
		return &specs.Hook{HookName: "createContainer", Path: project.Agent, Args: append([]string{"chandler", "hook", name}, args...)}
	}
	library := &specs.Mount{HostPath: dir + "/libcuda.so.570.124.06", ContainerPath: "/usr/lib64/libcuda.so.570.124.06", Options: []string{"ro", "bind"}}
	writeCDI(t, &specs.Spec{Version: "0.8.0", Kind: "e2e.example/library", Devices: []specs.Device{
		{Name: "mounted", ContainerEdits: specs.ContainerEdits{Mounts: []*specs.Mount{library}}},
		{Name: "hooked", ContainerEdits: specs.ContainerEdits{Mounts: []*specs.Mount{library}, Hooks: []*specs.Hook{
			hook("create-symlinks", "--link=libcuda.so.1::/usr/lib64/libcuda.so"),
			hook("enable-cuda-compat", "--host-driver-version=570.124.06"),
			hook("update-ldcache", "--folder=/usr/lib64"),
			hook("disable-device-node-modification"),
			hook("update-application-profile"),
		}}},
	}})
	serveLibrary(t, "mounted")
	serveLibrary(t, "hooked")
	for device, want := range map[string]string{
		"mounted": "libcuda.so.1: cannot open shared object file: No such file or directory",
		"hooked":  "the host's library",
	} {
		for _, readOnly := range []bool{false, true} {
			name := fmt.Sprintf("loads-%s-%t", device, readOnly)
			pod := fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  restartPolicy: Never
  containers:
  - name: any
    image: localhost/loads-cuda:1
    imagePullPolicy: Never
    securityContext: {readOnlyRootFilesystem: %t}
    resources: {limits: {e2e.example/%s: 1}}
`, name, readOnly, device)
			apply(t, pod)
			if _, err := kube.WaitForPod(within(t), metav1.NamespaceDefault, name, corev1.PodSucceeded); err != nil {
				t.Fatal(err)
			}
			logs, err := kube.Logs(within(t), metav1.NamespaceDefault, name, "")
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.TrimSpace(logs); got != want {
				t.Errorf("pod %s: %q; want %q", name, got, want)
			}
			remove(t, pod)
		}
	}
}

// libraryPlugin is a device plugin that gives a container a device of the test's own CDI spec.
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

func compile(t *testing.T, source string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "cc", append([]string{"-x", "c", "-"}, args...)...)
	cmd.Stdin = strings.NewReader(source)
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, said)
	}
}

// writeCDI writes a CDI spec on the node, until the test ends.
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
