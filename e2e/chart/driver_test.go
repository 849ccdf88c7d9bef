package chart

import (
	"fmt"
	"os"
	"path"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/discovery/families/nvidia/userspace/drivertest"
	"chandler.dev/e2e/chandler"
)

// gpuDir is the node's directory of a host with one NVIDIA GPU. driverRoot is that host's driver
// root.
const (
	gpuDir     = "/var/lib/chandler/gpu"
	driverRoot = gpuDir + "/driver"
)

// gpuFiles are additional files of the recorded host with one GPU: device nodes, and the major
// numbers of their drivers.
const gpuFiles = `-- proc/devices --
Character devices:
  1 mem
195 nvidia
511 nvidia-uvm

Block devices:
-- dev/nvidiactl c 195:255 --
-- dev/nvidia0 c 195:0 --
-- dev/nvidia-uvm c 511:0 --
-- dev/null c 1:3 --
`

// driverValues are the values that a user needs for a driver root, and the paths of the simulated
// host.
const driverValues = `
image: {repository: registry.example.com/chandler, tag: v0.1.0}
nvidiaDriver: {root: ` + driverRoot + `}
hostPaths:
  sys: ` + gpuDir + `/sys
  proc: ` + gpuDir + `/proc
  dev: ` + gpuDir + `/dev
  features: ` + gpuDir + `/features
extraArgs: [--runtime-root=` + gpuDir + `, --rescan-interval=250ms]
log: {verbosity: 4}
`

// loadsPod returns a pod and its claim for a GPU. The pod loads NVIDIA's libraries in an image of
// the given shape.
func loadsPod(name, shape string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
    - name: gpu
      exactly: {deviceClassName: nvidia.chandler.dev}
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  restartPolicy: Never
  resourceClaims: [{name: gpu, resourceClaimName: %[1]s}]
  containers:
  - name: any
    image: %[2]s
    imagePullPolicy: Never
    resources: {claims: [{name: gpu}]}
`, name, chandler.CUDAImage(shape))
}

// testDriverRoot installs the chart with nvidiaDriver.root. An unprivileged agent in its own image must
// install the hooks, and an unprivileged host service must find the driver's files. Images of all shapes
// must load and call the driver's libraries. A removal must also remove the hooks.
func testDriverRoot(t *testing.T, p *privileged) {
	p.loadHostImage(t)
	if err := p.project.LoadCUDAImages(within(t), p.node.Node); err != nil {
		t.Fatal(err)
	}
	undo, err := p.project.LayOutMachine(within(t), p.node.Node, gpuDir, drivertest.RecordedHost(gpuFiles))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := undo(); err != nil {
			t.Error(err)
		}
	})
	drivertest.InstallDriver(t, p.node.NodePath(driverRoot), drivertest.RHEL)
	// The paths must also resolve below the runtime root.
	below := p.node.NodePath(gpuDir) + path.Dir(gpuDir)
	if err := os.MkdirAll(below, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(gpuDir, path.Join(below, path.Base(gpuDir))); err != nil {
		t.Fatal(err)
	}

	p.run(driverValues, "install", "chandler", p.project.Chart(), "--create-namespace", "--values=-")
	p.kubectl("label", "--overwrite", "namespace", chandler.Namespace, "pod-security.kubernetes.io/enforce=privileged")
	if err := chandler.WaitForAgent(within(t), p.kube); err != nil {
		t.Fatal(err)
	}
	p.healthy("pci-0000-01-00-0")
	agent, err := chandler.AgentPod(within(t), p.kube)
	if err != nil {
		t.Fatal(err)
	}
	if c := agent.Spec.Containers[0]; c.SecurityContext.Privileged != nil || len(c.SecurityContext.Capabilities.Add) > 0 || c.Image != chandler.AgentImage {
		t.Errorf("the agent has image %s and privileges %+v", c.Image, c.SecurityContext)
	}
	// The agent runs no programs on a simulated host, so the test runs the one of the service.
	p.hasHostService()
	out, err := p.node.Kubectl(within(t), "exec", "-n", chandler.Namespace, "daemonset/chandler-host", "--", "/chandler-host", "--files", "--host-root=/host", "--driver-root="+driverRoot).CombinedOutput()
	if err != nil || !strings.Contains(string(out), driverRoot+"/etc/OpenCL/vendors/nvidia.icd") {
		t.Errorf("the host service finds the files %s, %v", out, err)
	}
	for _, shape := range []string{"debian", "rhel"} {
		name := "loads-" + shape
		p.apply(loadsPod(name, shape))
		if _, err := p.kube.WaitForPod(within(t), metav1.NamespaceDefault, name, corev1.PodSucceeded); err != nil {
			t.Fatal(err)
		}
		said, err := p.kube.Logs(within(t), metav1.NamespaceDefault, name, "")
		if got := strings.TrimSpace(said); err != nil || got != "all were called" {
			t.Errorf("image of the shape %s: %q, %v", shape, got, err)
		}
		p.remove(loadsPod(name, shape))
	}
	p.run("", "uninstall", "chandler", "--wait")
	if left := p.left(); len(left) > 0 {
		t.Errorf("there is left %q", left)
	}
}
