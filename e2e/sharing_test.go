package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// sharedMemory shares the memory of all GPUs.
const sharedMemory = `
sharing:
- cel: device.attributes["chandler.dev"].kind == "gpu"
  unit: 1Gi
  resource: aliyun.com/gpu-mem
`

// twoClassicGPUs is an entry of resources that offers two GPUs by the device plugin API.
const twoClassicGPUs = `
- name: amd.com/gpu
  mode: DevicePlugin
  cel: device.attributes["resource.kubernetes.io"].?pciBusID.orValue("") in ["0000:23:00.0", "0000:24:00.0"]
`

// unitsOfEach is the memory of each recorded GPU in GiB, rounded down.
const unitsOfEach = 63

// TestSharedMemory shares the memory of GPUs between pods by both APIs. A pod may only get memory
// that is left.
func TestSharedMemory(t *testing.T) {
	offers(t)
	usualAgain(t)
	reconfigure(t, besides(t, sharedMemory, twoClassicGPUs))
	until(t, "the memory of two GPUs to be allocatable", func(ctx context.Context) error {
		return allocatableIs(ctx, "aliyun.com/gpu-mem", 2*unitsOfEach)
	})
	t.Run("DRA", testSharedByClaims)
	t.Run("DevicePlugin", testSharedByLimits)
	nothingHeld(t)
}

func testSharedByClaims(t *testing.T) {
	const address = "0000:43:00.0"
	ask := func(name, amount string) string {
		const exactly = "        deviceClassName: gpu.chandler.dev\n"
		return strings.Replace(gpuPod(name, address), exactly, exactly+"        capacity: {requests: {memory: "+amount+"}}\n", 1)
	}
	apply(t, ask("share-40", "40Gi"))
	running(t, "share-40")
	apply(t, ask("share-20", "20Gi"))
	if !has(t, "DRAConsumableCapacity") { // Without the gate, a claim cannot request an amount of memory.
		waits(t, "share-20")
		remove(t, ask("share-40", "40Gi"))
		running(t, "share-20")
		return
	}
	running(t, "share-20")
	third := ask("share-4", "4Gi")
	apply(t, third)
	waits(t, "share-4") // 3 GiB are left.
	remove(t, ask("share-20", "20Gi"))
	running(t, "share-4")

	apply(t, example(t, "gpu-memory.yaml"))
	f := succeed(t, "gpu-memory")
	if len(f.nodes("/dev/dri/renderD")) != 1 {
		t.Errorf("the example pod has the nodes %q", f["device"])
	}
	if memory := f.variable("CHANDLER_MEMORY"); memory != "4294967296" {
		t.Errorf("CHANDLER_MEMORY = %q in the example pod", memory)
	}
}

func testSharedByLimits(t *testing.T) {
	ask := func(name string, units int) string {
		return probePod(name, "[env, devices, wait]", fmt.Sprintf("limits: {aliyun.com/gpu-mem: %d}", units))
	}
	apply(t, ask("units-40", 40))
	running(t, "units-40")
	logs, err := kube.Logs(within(t), metav1.NamespaceDefault, "units-40", "")
	for _, want := range []string{"ALIYUN_COM_GPU_MEM_CONTAINER=40", "ALIYUN_COM_GPU_MEM_DEV=63", "/dev/kfd"} {
		if err != nil || !strings.Contains(logs, want) {
			t.Errorf("the container does not print %s: %v\n%s", want, err, logs)
		}
	}
	// units-20 fits beside the first pod, so the other GPU must stay free for units-60.
	apply(t, ask("units-20", 20))
	running(t, "units-20")
	apply(t, ask("units-60", 60))
	running(t, "units-60")
	// Each GPU has 3 units left, but the kubelet counts 6.
	apply(t, ask("units-5", 5))
	until(t, "the pod that no one GPU can serve to be refused", func(ctx context.Context) error {
		pod, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, "units-5", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if pod.Status.Phase != corev1.PodFailed || !strings.Contains(pod.Status.Message, "no device has that many left") {
			return errors.New(string(pod.Status.Phase) + ": " + pod.Status.Message)
		}
		return nil
	})
}
