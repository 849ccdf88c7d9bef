package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"chandler.dev/e2e/chandler"
)

// heldByOne returns the files of the only prepared claim, which has one request. The number of
// metadata files differs between versions of the agent.
func heldByOne() (held []string, err error) {
	held, err = chandler.Held(node.Node)
	if err != nil {
		return nil, err
	}
	kinds := make(map[string]int)
	for _, file := range held {
		for _, dir := range []string{chandler.CDIDir, chandler.RecordDir} {
			if strings.HasPrefix(file, dir+"/") {
				kinds[dir]++
			}
		}
	}
	specs, records := kinds[chandler.CDIDir], kinds[chandler.RecordDir]
	if specs != 2 || records != 1 || len(held) == specs+records {
		return nil, fmt.Errorf("held are %q; want two CDI specs, a record and metadata", held)
	}
	return held, nil
}

// holders starts a pod with a GPU by DRA and a pod with KVM by the device plugin API. It returns a
// check that both pods and their files are unchanged.
func holders(t *testing.T) (unharmed func(t *testing.T)) {
	t.Helper()
	pods := map[string]*corev1.Pod{"gpu-holder": nil}
	apply(t, gpuPod("gpu-holder", "0000:23:00.0"))
	if _, err := os.Stat("/dev/kvm"); err == nil {
		apply(t, kvmPod("kvm-holder"))
		pods["kvm-holder"] = nil
	}
	for name := range pods {
		pods[name] = running(t, name)
	}
	held, err := heldByOne()
	if err != nil {
		t.Fatal(err)
	}
	before := contents(t, held)
	return func(t *testing.T) {
		t.Helper()
		for name, pod := range pods {
			now := running(t, name)
			if now.UID != pod.UID || now.Status.ContainerStatuses[0].ContainerID != pod.Status.ContainerStatuses[0].ContainerID {
				t.Errorf("pod %s is another, or its container is", name)
			}
		}
		if after := contents(t, held); after != before {
			t.Errorf("a CDI spec, the record or the metadata changed:\n%s\nwas:\n%s", after, before)
		}
		// The GPU must not be allocated twice.
		apply(t, gpuPod("latecomer", "0000:23:00.0"))
		waits(t, "latecomer")
		remove(t, gpuPod("latecomer", "0000:23:00.0"))
	}
}

// contents returns the text of files on the node.
func contents(t *testing.T, files []string) string {
	t.Helper()
	var all strings.Builder
	for _, file := range files {
		data, err := os.ReadFile(node.NodePath(file))
		if err != nil {
			t.Error(err)
		}
		fmt.Fprintf(&all, "%s: %s\n", file, data)
	}
	return all.String()
}

// works checks that new pods get devices by both APIs.
func works(t *testing.T) {
	t.Helper()
	t.Run("new pods", func(t *testing.T) {
		apply(t, gpuPod("newcomer", "0000:24:00.0"))
		running(t, "newcomer")
		if _, err := os.Stat("/dev/kvm"); err == nil {
			apply(t, kvmPod("kvm-newcomer"))
			running(t, "kvm-newcomer")
		}
	})
}

// offers waits until the eight GPUs are in slices, each for one claim, and KVM is allocatable.
// After a test that shared the GPUs, the slices of the previous agent remain until the new agent
// publishes its own. A claim that gets a share from such a slice keeps the whole GPU out of the new
// slices.
func offers(t *testing.T) {
	t.Helper()
	until(t, "all devices to be offered", func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, kube)
		if err != nil {
			return err
		}
		if n := countGPUs(devices); n != 8 {
			return fmt.Errorf("%d GPUs are in slices, of these devices: %q", n, slices.Sorted(maps.Keys(devices)))
		}
		for name, device := range devices {
			if isGPU(device) && ptr.Deref(device.AllowMultipleAllocations, false) {
				return fmt.Errorf("GPU %s is shared in the slices", name)
			}
		}
		if _, err := os.Stat("/dev/kvm"); err != nil {
			return nil
		}
		n, err := allocatable(ctx, "devices.kubevirt.io/kvm")
		if err == nil && n == 0 {
			err = errors.New("no KVM is allocatable")
		}
		return err
	})
}

func countGPUs(devices map[string]resourceapi.Device) (n int) {
	for _, device := range devices {
		if isGPU(device) {
			n++
		}
	}
	return n
}

func isGPU(device resourceapi.Device) bool {
	return ptr.Deref(device.Attributes["kind"].StringValue, "") == "gpu"
}

// TestKubeletRestart restarts the kubelet. Claims must stay prepared, and both APIs must be
// registered again.
func TestKubeletRestart(t *testing.T) {
	unharmed := holders(t)
	registered := sockets(t)
	if err := node.RestartKubelet(within(t)); err != nil {
		t.Fatal(err)
	}
	if len(registered) > 0 {
		back := time.Now()
		until(t, "a new socket for the kubelet", func(context.Context) error {
			for _, socket := range sockets(t) {
				if !slices.Contains(registered, socket) {
					return nil
				}
			}
			return errors.New("there is none")
		})
		t.Logf("registered again %s after the kubelet answered", time.Since(back).Round(time.Millisecond))
	}
	offers(t)
	unharmed(t)
	works(t)
}

// sockets returns the names of the agent's sockets in the kubelet's directory of device plugins.
func sockets(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(node.NodePath("/var/lib/kubelet/device-plugins"))
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), "chandler-") {
			names = append(names, entry.Name())
		}
	}
	return names
}

// TestAgentRestart replaces the agent's pod. No allocation may be lost, and no device may be
// allocated twice.
func TestAgentRestart(t *testing.T) {
	unharmed := holders(t)
	agent, err := chandler.AgentPod(t.Context(), kube)
	if err != nil {
		t.Fatal(err)
	}
	if err := kube.DeletePod(within(t), chandler.Namespace, agent.Name); err != nil {
		t.Fatal(err)
	}
	if err := chandler.WaitForAgent(within(t), kube); err != nil {
		t.Fatal(err)
	}
	offers(t)
	unharmed(t)
	works(t)
}

// TestAgentKilled kills the agent. No allocation may be lost, and no device may be allocated twice.
// If a pod ends while the agent is away, the new process must release the pod's claim.
func TestAgentKilled(t *testing.T) {
	unharmed := holders(t)
	apply(t, gpuPod("short-lived", "0000:24:00.0"))
	running(t, "short-lived")
	killAgent(t)
	remove(t, gpuPod("short-lived", "0000:24:00.0"))
	if err := chandler.WaitForAgent(within(t), kube); err != nil {
		t.Fatal(err)
	}
	until(t, "the claim of the pod that ended to be let go of", func(context.Context) error {
		_, err := heldByOne()
		return err
	})
	offers(t)
	unharmed(t)
	works(t)
}

// killAgent kills the agent's process, as the kernel's OOM killer would, and waits until the
// kubelet has noticed.
func killAgent(t *testing.T) {
	t.Helper()
	agent, err := chandler.AgentPod(t.Context(), kube)
	if err != nil {
		t.Fatal(err)
	}
	pid := agentPID(t)
	if out, err := node.Command(within(t), "kill", "-9", pid).CombinedOutput(); err != nil {
		t.Fatalf("kill -9 %s: %v: %s", pid, err, out)
	}
	restarts := agent.Status.ContainerStatuses[0].RestartCount
	until(t, "the kubelet to restart the agent", func(ctx context.Context) error {
		now, err := chandler.AgentPod(ctx, kube)
		if err == nil && now.Status.ContainerStatuses[0].RestartCount == restarts {
			err = errors.New("it has not")
		}
		return err
	})
}

// agentPID returns the PID of the agent's only process.
func agentPID(t *testing.T) string {
	t.Helper()
	pids := agentPIDs(t)
	if len(pids) != 1 {
		t.Fatalf("processes of the agent: %q; want one", pids)
	}
	return pids[0]
}

// agentPIDs returns the PIDs of the agent's processes in the node's PID namespace.
func agentPIDs(t *testing.T) (pids []string) {
	t.Helper()
	proc := node.NodePath("/proc")
	entries, err := os.ReadDir(proc)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		line, err := os.ReadFile(proc + "/" + entry.Name() + "/cmdline")
		if err == nil && strings.HasPrefix(string(line), "/chandler\x00run\x00") {
			pids = append(pids, entry.Name())
		}
	}
	return pids
}

// generations returns names, UIDs and generations of all slices as text.
func generations(t *testing.T) string {
	t.Helper()
	list, err := kube.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, slice := range list.Items {
		all = append(all, fmt.Sprintf("%s %s %d", slice.Name, slice.UID, slice.Generation))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}
