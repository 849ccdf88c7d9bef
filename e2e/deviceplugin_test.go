package e2e

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
)

// These tests run on Kubernetes without resource.k8s.io too.

// allGPUs is how many GPUs the recorded server has.
const allGPUs = 8

// classicOnly has the device-plugin API offer all GPUs: where there is no DRA the
// usual configuration does, elsewhere another one.
func classicOnly(t *testing.T) {
	t.Helper()
	if *version != build.Classic {
		usualAgain(t)
		reconfigure(t, besides(t, "", classicGPUs))
	}
	gpusAre(t, allGPUs)
}

// gpusAre waits until so many GPUs are allocatable.
func gpusAre(t *testing.T, n int64) {
	t.Helper()
	until(t, "the GPUs to be allocatable by their classic name", func(ctx context.Context) error {
		return allocatableIs(ctx, "amd.com/gpu", n)
	})
}

// limitsPod is a pod that holds GPUs by their classic name until it is deleted.
func limitsPod(name string, gpus int) string {
	return probePod(name, "[env, devices, wait]", fmt.Sprintf("limits: {amd.com/gpu: %d}", gpus))
}

// oneGPU is a limitsPod with one.
func oneGPU(name string) string { return limitsPod(name, 1) }

// renderNodes returns the render nodes of a running pod's GPUs.
func renderNodes(t *testing.T, pod string) []string {
	t.Helper()
	running(t, pod)
	logs, err := kube.Logs(within(t), metav1.NamespaceDefault, pod, "")
	if err != nil {
		t.Fatal(err)
	}
	return factsOf(logs).nodes("/dev/dri/renderD")
}

// limitsHolder starts a pod that holds two GPUs, and returns a check that it
// still runs with them, and that nobody else gets them.
func limitsHolder(t *testing.T) (unharmed func(t *testing.T)) {
	t.Helper()
	apply(t, limitsPod("limits-holder", 2))
	held := renderNodes(t, "limits-holder")
	before := running(t, "limits-holder")
	return func(t *testing.T) {
		t.Helper()
		now := running(t, "limits-holder")
		if now.UID != before.UID || now.Status.ContainerStatuses[0].ContainerID != before.Status.ContainerStatuses[0].ContainerID {
			t.Error("the pod that holds two GPUs is another, or its container is")
		}
		all := limitsPod("limits-all-others", allGPUs-2)
		apply(t, all)
		nodes := renderNodes(t, "limits-all-others")
		if both := append(nodes, held...); len(slices.Compact(slices.Sorted(slices.Values(both)))) != allGPUs {
			t.Errorf("one pod has %q and another %q; want %d in all", held, nodes, allGPUs)
		}
		apply(t, oneGPU("limits-too-many"))
		waits(t, "limits-too-many")
		remove(t, all)
		running(t, "limits-too-many")
		remove(t, oneGPU("limits-too-many"))
	}
}

// TestDevicePlugin gives all GPUs to the device-plugin API, once for all that is
// tested of it.
func TestDevicePlugin(t *testing.T) {
	classicOnly(t)
	t.Run("Pods", testDevicePluginPods)
	t.Run("Upgrade", testDevicePluginUpgrade)
	t.Run("Restarts", testDevicePluginRestarts)
	t.Run("LostCheckpoint", testDevicePluginLostCheckpoint)
}

// Pods with classic limits get GPUs, each its own, as many as there are.
func testDevicePluginPods(t *testing.T) {
	limitsHolder(t)(t)
	whoLimits(t, "limits-holder", 2)
	if _, err := os.Stat("/dev/kvm"); err == nil {
		apply(t, kvmPod("limits-kvm"))
		running(t, "limits-kvm")
	}
}

// gpuLabel is how kubectl chandler names a GPU.
var gpuLabel = regexp.MustCompile(`\bgpu [0-9a-f]{2}:00\.0`)

// whoLimits has kubectl chandler say which GPUs a pod has by limits: the agent knows.
func whoLimits(t *testing.T, pod string, gpus int) {
	t.Helper()
	if *version == build.Classic {
		return // as other tests of the plugin
	}
	until(t, "kubectl chandler who to name the GPUs of "+pod, func(context.Context) error {
		stdout, stderr, code := plugin(t, "chandler", "who", pod)
		if n := len(gpuLabel.FindAllString(stdout, -1)); code != 0 || stderr != "" || n != gpus || !strings.Contains(stdout, "amd.com/gpu") {
			return fmt.Errorf("exit code %d, %s\n%s", code, stderr, stdout)
		}
		return nil
	})
}

// When the agent is replaced, and replaced again, pods with classic limits go on
// and others start throughout, and the kubelet rejects none.
func testDevicePluginUpgrade(t *testing.T) {
	other := "chandler.dev/chandler:other"
	if err := project.LoadAgent(within(t), node.Node, other); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { rollOut(t, chandler.AgentImage) })
	unharmed := limitsHolder(t)
	pods := startTraffic(t, oneGPU, oneGPU, oneGPU)
	pods.further(t, 1)
	for _, image := range []string{other, chandler.AgentImage} {
		rollOut(t, image)
		pods.further(t, 2)
	}
	pods.end(t)
	pods.noCallFailed(t)
	unharmed(t)
}

// When the agent is killed, or the kubelet restarts, pods with classic limits
// keep their GPUs and new ones get others.
func testDevicePluginRestarts(t *testing.T) {
	for name, restart := range map[string]func(*testing.T){
		"agent": killAgent,
		"kubelet": func(t *testing.T) {
			if err := node.RestartKubelet(within(t)); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			unharmed := limitsHolder(t)
			restart(t)
			if err := chandler.WaitForAgent(within(t), kube); err != nil {
				t.Fatal(err)
			}
			gpusAre(t, allGPUs)
			unharmed(t)
		})
	}
}

// Containers get devices by CDI names where the configuration says so, and have the
// same ones when they start again.
func TestDevicePluginByCDI(t *testing.T) {
	for _, strategy := range []string{"CDIAnnotations", "CDIDevices"} {
		t.Run(strategy, func(t *testing.T) {
			usualAgain(t)
			resources := classicGPUs
			if *version == build.Classic {
				resources = "" // it has no other API
			}
			reconfigure(t, besides(t, fmt.Sprintf("allocation: [{resource: amd.com/gpu, deviceListStrategy: [%s]}]\n", strategy), resources))
			gpusAre(t, allGPUs)
			unharmed := limitsHolder(t)
			killAgent(t)
			if err := chandler.WaitForAgent(within(t), kube); err != nil {
				t.Fatal(err)
			}
			gpusAre(t, allGPUs)
			unharmed(t)
		})
	}
}

// A kubelet that has lost its checkpoint takes the GPUs of pods that run for free.
// Nobody else gets them as long as those pods run.
func testDevicePluginLostCheckpoint(t *testing.T) {
	apply(t, limitsPod("limits-holder", allGPUs/2))
	held := renderNodes(t, "limits-holder")
	if err := node.StopKubelet(within(t)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(node.NodePath("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")); err != nil {
		t.Error(err)
	}
	if err := node.StartKubelet(within(t)); err != nil {
		t.Fatal(err)
	}
	gpusAre(t, allGPUs)
	for i := range allGPUs / 2 {
		name := fmt.Sprintf("limits-latecomer-%d", i)
		apply(t, oneGPU(name))
		var phase corev1.PodPhase
		until(t, "the pod to run or to be refused", func(ctx context.Context) error {
			pod, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, name, metav1.GetOptions{})
			if phase = ""; err == nil {
				phase = pod.Status.Phase
			}
			if phase != corev1.PodRunning && phase != corev1.PodFailed {
				return fmt.Errorf("it is %s, %w", phase, err)
			}
			return nil
		})
		t.Logf("%s is %s", name, phase)
		if phase == corev1.PodRunning {
			for _, path := range renderNodes(t, name) {
				if slices.Contains(held, path) {
					t.Errorf("%s has %s, which limits-holder has", name, path)
				}
			}
		}
	}
	running(t, "limits-holder")
}
