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

// These tests also run on Kubernetes without resource.k8s.io.

// allGPUs is the number of GPUs of the recorded server.
const allGPUs = 8

// classicOnly offers all GPUs by the device plugin API. On Kubernetes without DRA the usual
// configuration does so; elsewhere classicOnly changes the configuration.
func classicOnly(t *testing.T) {
	t.Helper()
	if *version != build.Classic {
		usualAgain(t)
		reconfigure(t, besides(t, "", classicGPUs))
	}
	gpusAre(t, allGPUs)
}

// gpusAre waits until n GPUs are allocatable.
func gpusAre(t *testing.T, n int64) {
	t.Helper()
	until(t, "the GPUs to be allocatable by their classic name", func(ctx context.Context) error {
		return allocatableIs(ctx, "amd.com/gpu", n)
	})
}

// limitsPod returns a pod with GPUs by limits, which runs until it is deleted.
func limitsPod(name string, gpus int) string {
	return probePod(name, "[env, devices, wait]", fmt.Sprintf("limits: {amd.com/gpu: %d}", gpus))
}

// oneGPU returns a limitsPod with one GPU.
func oneGPU(name string) string { return limitsPod(name, 1) }

// renderNodes waits until a pod runs and has printed its devices, and returns the render nodes of
// its GPUs. A container runs before its program has printed anything.
func renderNodes(t *testing.T, pod string) (nodes []string) {
	t.Helper()
	running(t, pod)
	until(t, "the render nodes of pod "+pod, func(ctx context.Context) error {
		logs, err := kube.Logs(ctx, metav1.NamespaceDefault, pod, "")
		if nodes = factsOf(logs).nodes("/dev/dri/renderD"); err == nil && len(nodes) == 0 {
			err = fmt.Errorf("the log has none: %q", logs)
		}
		return err
	})
	return nodes
}

// limitsHolder starts a pod with two GPUs. It returns a check that the pod still runs with the same
// GPUs, and that no other pod gets them.
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

// TestDevicePlugin offers all GPUs by the device plugin API, and runs the tests of that API. They
// share one configuration because a change takes long.
func TestDevicePlugin(t *testing.T) {
	classicOnly(t)
	t.Run("Pods", testDevicePluginPods)
	t.Run("Upgrade", testDevicePluginUpgrade)
	t.Run("Restarts", testDevicePluginRestarts)
	t.Run("LostCheckpoint", testDevicePluginLostCheckpoint)
	t.Run("ByCDI", testDevicePluginByCDI)
}

// testDevicePluginPods creates pods with GPUs by limits. Each GPU must be in one pod only, and all
// GPUs must be usable.
func testDevicePluginPods(t *testing.T) {
	limitsHolder(t)(t)
	whoLimits(t, "limits-holder", 2)
	if _, err := os.Stat("/dev/kvm"); err == nil {
		apply(t, kvmPod("limits-kvm"))
		running(t, "limits-kvm")
	}
}

// gpuLabel matches kubectl chandler's name for a GPU.
var gpuLabel = regexp.MustCompile(`\bgpu [0-9a-f]{2}:00\.0`)

// whoLimits checks the output of kubectl chandler who for the GPUs of a pod with limits, which only
// the agent knows.
func whoLimits(t *testing.T, pod string, gpus int) {
	t.Helper()
	if *version == build.Classic {
		return // as in other tests of the kubectl plugin
	}
	until(t, "kubectl chandler who to name the GPUs of "+pod, func(context.Context) error {
		stdout, stderr, code := plugin(t, "chandler", "who", pod)
		if n := len(gpuLabel.FindAllString(stdout, -1)); code != 0 || stderr != "" || n != gpus || !strings.Contains(stdout, "amd.com/gpu") {
			return fmt.Errorf("exit code %d, %s\n%s", code, stderr, stdout)
		}
		return nil
	})
}

// testDevicePluginUpgrade replaces the agent twice. Throughout, pods with limits must keep running
// and other pods must start, and the kubelet must not reject any pod.
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

// testDevicePluginRestarts kills the agent or restarts the kubelet. Pods with limits must keep
// their GPUs, and new pods must get other GPUs.
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

// testDevicePluginByCDI configures CDI names as the strategy of the device plugin API. Containers
// must get their devices, and get the same devices after the agent was killed.
func testDevicePluginByCDI(t *testing.T) {
	resources := classicGPUs
	if *version == build.Classic { // no other API exists
		resources = ""
		usualAgain(t)
	}
	for _, strategy := range []string{"CDIAnnotations", "CDIDevices"} {
		t.Run(strategy, func(t *testing.T) {
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

// testDevicePluginLostCheckpoint removes the kubelet's checkpoint, so that the kubelet considers
// the GPUs of running pods free. No other pod may get the GPUs while these pods run.
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
