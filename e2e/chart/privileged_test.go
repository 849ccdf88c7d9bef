package chart

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// kernelDir is the node's directory of a simulated host that reacts to writes like a kernel.
const kernelDir = "/var/lib/chandler/kernel"

// privilegedValues enable the features that change that host, by the host service. The host's /proc is
// simulated too, because VFIO passthrough checks the open files of all processes, and the node of
// the tests is itself a container.
const privilegedValues = `
image: {repository: registry.example.com/chandler, tag: v0.1.0}
deviceClasses: {families: [all]}
passthrough: {enabled: true}
onDemand: {enabled: true}
reclaim: {enabled: true}
hostPaths:
  sys: ` + kernelDir + `/sys
  proc: ` + kernelDir + `/proc
  dev: ` + kernelDir + `/dev
  features: ` + kernelDir + `/features
extraArgs: [--runtime-root=` + kernelDir + `, --rescan-interval=250ms]
log: {verbosity: 4}
uninstall: {timeout: 8s}
config:
  passthrough:
  - cel: device.attributes["chandler.dev"].?pciClass.orValue("").startsWith("0108")
  - cel: device.attributes["chandler.dev"].kind == "nic" && device.attributes["chandler.dev"].function == "virtual"
  onDemand:
    keepSeconds: 600
    virtualFunctions:
    - cel: "true"
      count: 2
  reclaim:
  - cel: device.attributes["chandler.dev"].family == "dlb"
`

// The devices of that host.
const (
	diskAddress, diskDevice     = "0000:04:00.0", "pci-0000-04-00-0"
	adapterAddress              = "0000:03:00.0"
	virtualDevice               = "pci-0000-03-10-0"
	balancerDevice, balancerDev = "pci-0000-05-00-0", "dlb0"
)

// newKernel lays out that host: a disk, a network adapter with virtual functions, and a load
// balancer whose device node is a harmless /dev/full.
func newKernel(t *testing.T, dir string) *passthroughtest.Kernel {
	k := passthroughtest.At(t, dir)
	k.Add(diskAddress, "nvme", "3")
	k.AddPhysical(&passthroughtest.Physical{Address: adapterAddress, Total: 4, Makes: 2})
	source := passthroughtest.Source("0000:05:00.0")
	for name, text := range map[string]string{"class": "0x0b4000", "vendor": "0x8086", "device": "0x2710", "numa_node": "0", "dlb2/dlb0/dev": "1:7", "dlb2/dlb0/uevent": "MAJOR=1\nMINOR=7\nDEVNAME=" + balancerDev} {
		k.File(source+"/"+name, text+"\n")
	}
	k.File("sys/bus/pci/drivers/dlb2/unbind", "")
	k.Link(source+"/driver", "../../../../bus/pci/drivers/dlb2")
	k.Link(source+"/dlb2/dlb0/device", "../../../0000:05:00.0")
	k.Link("sys/bus/pci/devices/0000:05:00.0", "../../../"+strings.TrimPrefix(source, "sys/"))
	k.Link("sys/class/dlb2/dlb0", "../../"+strings.TrimPrefix(source, "sys/")+"/dlb2/dlb0")
	k.File("dev/"+balancerDev, "c 1:7")
	return k
}

// pod returns a pod and its claim for a device, optionally under vfio. The pod runs until it is
// deleted.
func pod(name, device string, vfio bool) string {
	config := ""
	if vfio {
		config = `
    config:
    - requests: [device]
      opaque: {driver: chandler.dev, parameters: {apiVersion: chandler.dev/v1alpha1, kind: ClaimParameters, driver: vfio}}`
	}
	address := strings.Replace(strings.Replace(strings.Replace(strings.TrimPrefix(device, "pci-"), "-", ":", 1), "-", ":", 1), "-", ".", 1)
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
    - name: device
      exactly:
        deviceClassName: chandler-any
        selectors:
        - cel: {expression: 'device.attributes["resource.kubernetes.io"].?pciBusID.orValue("") == "%[2]s"'}%[3]s
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: device, resourceClaimName: %[1]s}]
  containers:
  - name: probe
    image: chandler.dev/probe:latest
    imagePullPolicy: Never
    args: [devices, wait]
    resources: {claims: [{name: device}]}
`, name, address, config)
}

// anyClass is a DeviceClass of all devices of the driver.
const anyClass = `
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: chandler-any}
spec:
  selectors:
  - cel: {expression: device.driver == "chandler.dev"}
`

// privileged is a cluster with host services, and the simulated host of its node.
type privileged struct {
	*installed

	kernel *passthroughtest.Kernel
}

// TestPrivileged installs the chart with VFIO passthrough, on-demand devices and reclaim on a real
// cluster. The agents and the host services run with the permissions of these values in a namespace
// whose Pod Security level allows them.
func TestPrivileged(t *testing.T) {
	p := &privileged{installed: startOn(t, cluster.Config{PodSecurity: "baseline"})}
	p.loadHostImage(t)
	p.kernel = newKernel(t, p.node.NodePath(kernelDir))
	if err := p.kube.Apply(within(t), anyClass); err != nil {
		t.Fatal(err)
	}
	t.Run("installed", p.with(testInstalled))
	t.Run("rebound", p.with(testRebound))
	t.Run("made", p.with(testMade))
	t.Run("without rights", p.with(testWithoutRights))
	t.Run("without the host service", p.with(testWithoutHostService))
	t.Run("handed over", p.with(testHandedOver))
	t.Run("removed", p.with(testRemoved))
	t.Run("kept up", p.with(testKeptUp))
	t.Run("a driver's root", p.with(testDriverRoot))
}

// with returns a test that continues on the cluster of the previous tests.
func (p *privileged) with(test func(*testing.T, *privileged)) func(*testing.T) {
	return func(t *testing.T) {
		in := *p.installed
		in.t = t
		test(t, &privileged{&in, p.kernel})
		if t.Failed() {
			p.tell(t)
		}
	}
}

// tell logs the writes to the simulated kernel and the end of the agent's log.
func (p *privileged) tell(t *testing.T) {
	agent, err := chandler.AgentPod(within(t), p.kube)
	if err != nil {
		t.Log(err)
		return
	}
	said, _ := p.kube.Logs(within(t), chandler.Namespace, agent.Name, "")
	t.Logf("the kernel was written %q; the agent's log ends with\n%s", p.kernel.ListWrites(), said[max(0, len(said)-6000):])
}

// testInstalled expects the namespace to reject the agents until it is labelled as Helm's notes
// describe. The agent must have no privilege.
func testInstalled(t *testing.T, p *privileged) {
	notes := p.run(privilegedValues, "install", "chandler", p.project.Chart(), "--create-namespace", "--values=-")
	label := regexp.MustCompile(`kubectl (label namespace .*)`).FindStringSubmatch(notes)
	if label == nil {
		t.Fatalf("the notes do not say how to label the namespace:\n%s", notes)
	}
	p.until("the agents to be refused", func(ctx context.Context) error {
		set, err := p.kube.AppsV1().DaemonSets(chandler.Namespace).Get(ctx, chandler.DaemonSet, metav1.GetOptions{})
		if err != nil {
			return err
		}
		events, err := p.kube.CoreV1().Events(chandler.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=FailedCreate"})
		if err == nil && (len(events.Items) == 0 || set.Status.CurrentNumberScheduled > 0) {
			err = fmt.Errorf("%d agents, %d events", set.Status.CurrentNumberScheduled, len(events.Items))
		}
		return err
	})
	p.kubectl(strings.Fields(label[1])...)
	if err := chandler.WaitForAgent(within(t), p.kube); err != nil {
		t.Fatal(err)
	}
	p.hasHostService()
	agent, err := chandler.AgentPod(within(t), p.kube)
	if err != nil {
		t.Fatal(err)
	}
	if context := agent.Spec.Containers[0].SecurityContext; agent.Spec.HostPID || context.Privileged != nil || len(context.Capabilities.Add) > 0 {
		t.Errorf("the agent has %+v, hostPID %v", context, agent.Spec.HostPID)
	}
	p.healthy(diskDevice, virtualDevice, balancerDevice)
	if out := p.doctor(); strings.Contains(out, "CH0") {
		t.Errorf("doctor finds\n%s", out)
	}
}

// testRebound binds the disk to vfio for a pod, and back when the pod has ended. Meanwhile the
// agent is killed.
func testRebound(t *testing.T, p *privileged) {
	manifest := pod("vm", diskDevice, true)
	p.apply(manifest)
	p.has("vm", "/dev/vfio/3", "/dev/vfio/vfio")
	p.driver("vfio-pci")
	p.killAgent()
	p.driver("vfio-pci")
	p.remove(manifest)
	p.driver("nvme")
	p.healthy(diskDevice)
}

// testMade creates virtual functions for a pod with one of them under vfio. The functions must
// remain for a while after the pod has ended.
func testMade(t *testing.T, p *privileged) {
	manifest := pod("network", virtualDevice, true)
	p.apply(manifest)
	p.has("network", "/dev/vfio/20", "/dev/vfio/vfio")
	if n := p.kernel.VirtualCount(adapterAddress); n != 2 {
		t.Errorf("%d virtual functions", n)
	}
	p.killAgent()
	p.remove(manifest)
	p.until("the virtual function to be returned", func(context.Context) error {
		if d := p.kernel.Driver(passthroughtest.VirtualAddress(0)); d != "igbvf" {
			return fmt.Errorf("its driver is %q", d)
		}
		return nil
	})
	if n := p.kernel.VirtualCount(adapterAddress); n != 2 {
		t.Errorf("%d virtual functions, which were to be kept", n)
	}
}

// testWithoutRights switches the features off while the disk is bound to vfio. The disk must keep its
// driver and block a removal, whose message names the missing value. With the features, the disk
// must get its driver back.
func testWithoutRights(t *testing.T, p *privileged) {
	manifest := pod("vm", diskDevice, true)
	p.apply(manifest)
	p.has("vm", "/dev/vfio/3", "/dev/vfio/vfio")
	unconfigured, _, _ := strings.Cut(privilegedValues, "config:")
	p.upgrade(unconfigured, "--set=passthrough.enabled=false,onDemand.enabled=false,reclaim.enabled=false")
	p.remove(manifest)
	p.until("the removal to be refused", func(context.Context) error {
		out, err := p.uninstall()
		if err == nil {
			return errors.New("Chandler was removed")
		}
		for _, want := range []string{"device " + diskDevice, "nvme", "passthrough.enabled"} {
			if !strings.Contains(out, want) {
				return fmt.Errorf("the removal does not say %q:\n%s", want, out)
			}
		}
		t.Log(out)
		return nil
	})
	p.driver("vfio-pci")
	p.upgrade(privilegedValues)
	p.driver("nvme")
	p.healthy(diskDevice)
}

// loadHostImage loads the image with chandler-host. It skips the test if there is no C compiler.
func (p *privileged) loadHostImage(t *testing.T) {
	for _, compiler := range []string{"cc", "gcc"} {
		if _, err := exec.LookPath(compiler); err != nil {
			t.Skip("there is no C compiler: ", err)
		}
	}
	program, err := (build.Builder{Progress: os.Stderr}).MockedNVML(t.Context(), p.project.Dir) // A first build takes long.
	if err != nil {
		t.Fatal(err)
	}
	image := cluster.Image{
		Name: chandler.AgentImage + "-host", Files: map[string]string{"/chandler": p.project.Agent, "/chandler-host": program}, Entrypoint: []string{"/chandler"},
	}
	if err := p.node.LoadImage(within(t), image); err != nil {
		t.Fatal(err)
	}
}

// testWithoutHostService ends the host service. A claim must wait for it by name, and continue with the
// next service.
func testWithoutHostService(t *testing.T, p *privileged) {
	p.kubectl("patch", "daemonset", "-n", chandler.Namespace, "chandler-host", "--patch", `{"spec": {"template": {"spec": {"nodeSelector": {"none": "none"}}}}}`)
	manifest := pod("vm", diskDevice, true)
	p.until("the host service to end", func(ctx context.Context) error {
		pods, err := p.kube.CoreV1().Pods(chandler.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=chandler-host"})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d pods", len(pods.Items))
		}
		return err
	})
	p.apply(manifest)
	p.until("an Event that names the host service", func(ctx context.Context) error {
		events, err := p.kube.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=vm"})
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(events.Items, func(e corev1.Event) bool { return strings.Contains(e.Message, "host service") }) {
			return fmt.Errorf("%d events", len(events.Items))
		}
		return nil
	})
	p.kubectl("patch", "daemonset", "-n", chandler.Namespace, "chandler-host", "--type=json", "--patch", `[{"op": "remove", "path": "/spec/template/spec/nodeSelector"}]`)
	p.has("vm", "/dev/vfio/3", "/dev/vfio/vfio")
	p.remove(manifest)
	p.driver("nvme")
}

// testHandedOver forcibly deletes a pod while a process in its cgroup hangs in the kernel with the
// device open. The next pod must wait until the process has ended. A monitor outside all pods'
// cgroups has the device open all the time.
func testHandedOver(t *testing.T, p *privileged) {
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("this machine has no /dev/fuse, by which a process hangs")
	}
	p.upgrade(privilegedValues, "--set=hostPaths.proc=/proc")
	p.healthy(balancerDevice)
	if out := p.doctor(); !strings.Contains(out, "the agent can determine which devices") {
		t.Errorf("doctor says\n%s", out)
	}
	node := kernelDir + "/dev/" + balancerDev
	monitor := p.node.Command(t.Context(), "sh", "-c", "exec sleep 600 3<"+node)
	if err := monitor.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = monitor.Process.Kill(), monitor.Wait() }()

	first, second := pod("first", balancerDevice, false), pod("second", balancerDevice, false)
	p.apply(first)
	p.has("first", "/dev/"+balancerDev)
	process, end := p.stuck(node)
	p.join(process, "first")
	p.kubectl("delete", "pod", "first", "--force", "--grace-period=0")
	p.kubectl("delete", "resourceclaim", "first")
	p.log("A device is withheld from its next consumer", balancerDevice, "process "+process+" (", "has it open")
	p.apply(second)
	time.Sleep(3 * time.Second)
	if now, err := p.kube.CoreV1().Pods(metav1.NamespaceDefault).Get(within(t), "second", metav1.GetOptions{}); err != nil || now.Status.Phase != corev1.PodPending {
		t.Errorf("while the process has the device open the next pod is %s, %v", now.Status.Phase, err)
	}
	began := time.Now()
	end()
	p.has("second", "/dev/"+balancerDev)
	t.Logf("the next pod had the device %v after the process had ended", time.Since(began).Round(100*time.Millisecond))

	// Now only the monitor has the device open.
	p.remove(second)
	third := pod("third", balancerDevice, false)
	p.apply(third)
	p.has("third", "/dev/"+balancerDev)
	p.remove(third)
}

// testRemoved removes the chart, which must leave nothing behind.
func testRemoved(t *testing.T, p *privileged) {
	p.upgrade(privilegedValues, "--set=uninstall.timeout=1m")
	p.run("", "uninstall", "chandler", "--wait")
	if driver := p.kernel.Driver(diskAddress); driver != "nvme" {
		t.Errorf("the disk has driver %q", driver)
	}
	if left := p.left(); len(left) > 0 {
		t.Errorf("there is left %q", left)
	}
}
