package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"chandler.dev/e2e/chandler"
)

// facts is the output of the probe, by kind of fact.
type facts map[string][]string

// succeed waits for a pod to succeed and returns the probe's output.
func succeed(t *testing.T, name string) facts {
	t.Helper()
	ctx := within(t)
	if _, err := kube.WaitForPod(ctx, metav1.NamespaceDefault, name, corev1.PodSucceeded); err != nil {
		t.Fatal(err)
	}
	logs, err := kube.Logs(ctx, metav1.NamespaceDefault, name, "")
	if err != nil {
		t.Fatal(err)
	}
	return factsOf(logs)
}

// factsOf parses the probe's output.
func factsOf(logs string) facts {
	f := make(facts)
	for line := range strings.Lines(logs) {
		kind, fact, _ := strings.Cut(strings.TrimSpace(line), " ")
		f[kind] = append(f[kind], fact)
	}
	return f
}

// variable returns the value of an environment variable, or "".
func (f facts) variable(name string) string {
	for _, variable := range f["env"] {
		if value, ok := strings.CutPrefix(variable, name+"="); ok {
			return value
		}
	}
	return ""
}

// nodes returns the paths of the device nodes that begin with prefix.
func (f facts) nodes(prefix string) (paths []string) {
	for _, fact := range f["device"] {
		fields := strings.Fields(fact)
		if path := fields[len(fields)-1]; strings.HasPrefix(path, prefix) {
			paths = append(paths, path)
		}
	}
	return paths
}

// running waits until a pod runs, and returns it.
func running(t *testing.T, name string) *corev1.Pod {
	t.Helper()
	pod, err := kube.WaitForPod(within(t), metav1.NamespaceDefault, name, corev1.PodRunning)
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

// TestPodWithTwoGPUs uses a claim template for two GPUs on one NUMA node. The pod must get the
// device nodes and the names of two such GPUs.
func TestPodWithTwoGPUs(t *testing.T) {
	offers(t)
	offered, err := chandler.Devices(t.Context(), kube)
	if err != nil {
		t.Fatal(err)
	}
	apply(t, example(t, "gpu-pair.yaml"))
	f := succeed(t, "gpu-pair")

	names := strings.Split(f.variable("CHANDLER_DEVICES"), ",")
	if len(names) != 2 {
		t.Fatalf("CHANDLER_DEVICES = %q; want two devices", names)
	}
	if again := f.variable("CHANDLER_DEVICES_PAIR_GPUS"); again != strings.Join(names, ",") {
		t.Errorf("CHANDLER_DEVICES_PAIR_GPUS = %q; want %q", again, names)
	}
	var nodes []int64
	for _, name := range names {
		node := offered[name].Attributes["resource.kubernetes.io/numaNode"].IntValue
		if node == nil {
			t.Fatalf("device %s is not offered, or has no NUMA node", name)
		}
		nodes = append(nodes, *node)
	}
	if nodes[0] != nodes[1] {
		t.Errorf("the devices are on the NUMA nodes %d", nodes)
	}
	if got := f.nodes("/dev/dri/renderD"); len(got) != 2 {
		t.Errorf("render nodes %q; want two", got)
	}
	if got := f.nodes("/dev/kfd"); len(got) != 1 {
		t.Errorf("nodes %q; want one /dev/kfd", got)
	}
	remove(t, example(t, "gpu-pair.yaml"))
	nothingHeld(t)
}

// TestPodWithKVM expects a limit to give a pod a working /dev/kvm.
func TestPodWithKVM(t *testing.T) {
	needKVM(t)
	apply(t, example(t, "kvm-classic.yaml"))
	f := succeed(t, "kvm-classic")
	if got := f["kvm"]; len(got) != 1 || got[0] != "12" {
		t.Errorf("the KVM API version is %q; want 12", got)
	}
}

func needKVM(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skip("this machine has no /dev/kvm")
	}
}

// TestOneAPIForEachDevice checks that a device of the device plugin API is in no slice, and that a
// device of DRA is not in the node's allocatable resources.
func TestOneAPIForEachDevice(t *testing.T) {
	needKVM(t)
	until(t, "devices.kubevirt.io/kvm to be allocatable", func(ctx context.Context) error {
		n, err := allocatable(ctx, "devices.kubevirt.io/kvm")
		if err == nil && n == 0 {
			err = errors.New("it is zero")
		}
		return err
	})
	devices, err := chandler.Devices(t.Context(), kube)
	if err != nil {
		t.Fatal(err)
	}
	if _, offered := devices["kvm"]; offered {
		t.Error("kvm is offered by DRA too")
	}
	if n, err := allocatable(t.Context(), "amd.com/gpu"); err != nil || n != 0 {
		t.Errorf("amd.com/gpu: %d allocatable, %v; want none", n, err)
	}
}

func allocatable(ctx context.Context, resource corev1.ResourceName) (int64, error) {
	n, err := kube.CoreV1().Nodes().Get(ctx, node.NodeName(), metav1.GetOptions{})
	if err != nil {
		return 0, err
	}
	quantity := n.Status.Allocatable[resource]
	return quantity.Value(), nil
}

// TestTwoPodsTakeTurns creates two pods for the same GPU. One must wait until the other has ended.
func TestTwoPodsTakeTurns(t *testing.T) {
	manifest := example(t, "gpu-in-turns.yaml")
	apply(t, manifest)
	var first, second string
	until(t, "one pod to run and one to wait", func(ctx context.Context) error {
		first, second = "", ""
		for _, name := range []string{"first", "second"} {
			pod, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if pod.Status.Phase == corev1.PodRunning {
				first = name
			} else if unschedulable(pod) {
				second = name
			}
		}
		if first == "" || second == "" {
			return fmt.Errorf("%q runs, %q is unschedulable", first, second)
		}
		return nil
	})
	if err := kube.DeletePod(within(t), metav1.NamespaceDefault, first); err != nil {
		t.Fatal(err)
	}
	running(t, second)
	remove(t, manifest)
	nothingHeld(t)
}

// waits waits until the scheduler has marked a pod as unschedulable.
func waits(t *testing.T, name string) {
	t.Helper()
	until(t, "pod "+name+" to be unschedulable", func(ctx context.Context) error {
		pod, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, name, metav1.GetOptions{})
		if err == nil && !unschedulable(pod) {
			err = fmt.Errorf("it is %s", pod.Status.Phase)
		}
		return err
	})
}

func unschedulable(pod *corev1.Pod) bool {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Reason == corev1.PodReasonUnschedulable {
			return true
		}
	}
	return false
}

// TestClassicLimit creates a pod with a limit for GPUs. If the cluster serves extended resources by
// DRA, the pod must get the GPUs without any change. Otherwise it must wait until the device plugin
// API offers GPUs.
func TestClassicLimit(t *testing.T) {
	pod := probePod("classic-gpus", "[env, devices]", "limits: {amd.com/gpu: 2}")
	apply(t, pod)
	if !has(t, "DRAExtendedResource") {
		waits(t, "classic-gpus")
		usualAgain(t)
		reconfigure(t, besides(t, "", classicGPUs))
	}
	f := succeed(t, "classic-gpus")
	if got := f.nodes("/dev/dri/renderD"); len(got) != 2 {
		t.Errorf("render nodes %q; want two", got)
	}
	remove(t, pod)
	nothingHeld(t)
}

// probePod returns a pod that runs the probe with the given steps and resources.
func probePod(name, steps, resources string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  containers:
  - name: probe
    image: chandler.dev/probe:latest
    imagePullPolicy: Never
    args: %s
    resources: {%s}
`, name, steps, resources)
}

// gpuPod returns a pod and its claim for one particular GPU. The pod runs until it is deleted.
func gpuPod(name, address string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
    - name: gpu
      exactly:
        deviceClassName: gpu.chandler.dev
        selectors:
        - cel: {expression: 'device.attributes["resource.kubernetes.io"].?pciBusID.orValue("") == "%[2]s"'}
---
%[3]s
  resourceClaims: [{name: gpu, resourceClaimName: %[1]s}]
`, name, address, strings.TrimSpace(probePod(name, "[env, devices, wait]", "claims: [{name: gpu}]")))
}

// kvmPod returns a pod with /dev/kvm by a limit. The pod runs until it is deleted.
func kvmPod(name string) string {
	return probePod(name, "[kvm, wait]", "limits: {devices.kubevirt.io/kvm: 1}")
}

// warned waits for a Warning event of a pod that contains all words.
func warned(t *testing.T, pod string, words ...string) {
	t.Helper()
	until(t, fmt.Sprintf("an event of pod %s that says %q", pod, words), func(ctx context.Context) error {
		events, err := kube.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{
			FieldSelector: "type=Warning,involvedObject.kind=Pod,involvedObject.name=" + pod,
		})
		if err != nil {
			return err
		}
		var messages []string
		for _, event := range events.Items {
			if containsAll(event.Message, words) {
				return nil
			}
			messages = append(messages, event.Message)
		}
		return fmt.Errorf("the events say %q", messages)
	})
}

func containsAll(text string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return false
		}
	}
	return true
}

// TestClaimWithUnknownParameters allocates claims with invalid parameters, past the admission
// policy, which only checks specs and may be absent. The driver must refuse the claims and name the
// error.
func TestClaimWithUnknownParameters(t *testing.T) {
	for name, test := range map[string]struct{ parameters, names string }{
		"unknown-field": {`{"apiVersion": "chandler.dev/v1alpha1", "kind": "ClaimParameters", "hostPath": "/etc"}`, "hostPath"},
		"unknown-kind":  {`{"apiVersion": "chandler.dev/v1alpha1", "kind": "GpuConfig"}`, "GpuConfig"},
	} {
		t.Run(name, func(t *testing.T) {
			allocateByHand(t, name, "pci-0000-23-00-0", resourceapi.DeviceAllocationConfiguration{
				Source: resourceapi.AllocationConfigSourceClaim,
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: chandler.Driver, Parameters: runtime.RawExtension{Raw: []byte(test.parameters)},
				}},
			})
			warned(t, name, name, "request gpu", test.names)
		})
	}
	nothingHeld(t)
}

// TestClaimThatCannotBeHonoured allocates a device that is in another claim, and a device that does
// not exist. The driver must refuse both claims with the reason. The scheduler would not allocate
// these devices, so the test does.
func TestClaimThatCannotBeHonoured(t *testing.T) {
	const address, device = "0000:23:00.0", "pci-0000-23-00-0"
	apply(t, gpuPod("holder", address))
	running(t, "holder")

	allocateByHand(t, "usurper", device)
	warned(t, "usurper", "usurper", device, "holder")
	allocateByHand(t, "ghost", "pci-0000-ff-00-0")
	warned(t, "ghost", "ghost", "pci-0000-ff-00-0", "gone")
}

// allocateByHand creates a claim with an allocated device, and a pod on the node with this claim,
// as a faulty scheduler would.
func allocateByHand(t *testing.T, name, device string, config ...resourceapi.DeviceAllocationConfiguration) {
	t.Helper()
	ctx := within(t)
	claim, pod, _ := strings.Cut(gpuPod(name, "any"), "---")
	apply(t, claim)
	claims := kube.ResourceV1().ResourceClaims(metav1.NamespaceDefault)
	got, err := claims.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: chandler.Driver, Pool: node.NodeName(), Device: device}},
		Config:  config,
	}}
	if _, err := claims.UpdateStatus(ctx, got, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	// The controller manager reserves the claim for a pod that has a node.
	apply(t, strings.Replace(pod, "spec:", "spec:\n  nodeName: "+node.NodeName(), 1))
}
