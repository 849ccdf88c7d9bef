package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
)

// claimed returns a claim with one request, named "gpu", whose further fields are given as YAML.
func claimed(name, request string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s}
spec:
  devices:
    requests:
    - name: gpu
%s
---
`, name, strings.Trim(request, "\n"))
}

// claiming returns a pod that waits and uses an existing claim.
func claiming(name, claim string) string {
	return strings.TrimRight(probePod(name, "[env, devices, wait]", "claims: [{name: gpu}]"), "\n") +
		fmt.Sprintf("\n  resourceClaims: [{name: gpu, resourceClaimName: %s}]\n", claim)
}

// printed waits until a pod runs and the probe has printed all facts, and returns the facts.
func printed(t *testing.T, namespace, name string) facts {
	t.Helper()
	ctx := within(t)
	if _, err := kube.WaitForPod(ctx, namespace, name, corev1.PodRunning); err != nil {
		t.Fatal(err)
	}
	var f facts
	until(t, "what pod "+name+" prints", func(ctx context.Context) error {
		logs, err := kube.Logs(ctx, namespace, name, "")
		if f = factsOf(logs); err == nil && f["wait"] == nil {
			err = fmt.Errorf("it printed %q so far", logs)
		}
		return err
	})
	return f
}

// devicesOf returns the names of a claim's devices.
func devicesOf(t *testing.T, namespace, name string) (devices []string) {
	t.Helper()
	claim, err := kube.ResourceV1().ResourceClaims(namespace).Get(within(t), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if claim.Status.Allocation != nil {
		for _, result := range claim.Status.Allocation.Devices.Results {
			devices = append(devices, result.Device)
		}
	}
	return devices
}

// heldFor returns the claim's files on the node.
func heldFor(t *testing.T, name string) (files []string) {
	t.Helper()
	claim, err := kube.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Get(within(t), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	held, err := chandler.Held(node.Node)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range held {
		if strings.Contains(file, string(claim.UID)) {
			files = append(files, file)
		}
	}
	return files
}

// TestPrioritizedList creates a claim with a prioritized list. The pod must get the first available
// alternative, in an environment variable named after the chosen subrequest.
func TestPrioritizedList(t *testing.T) {
	offers(t)
	apply(t, claimed("listed", `
      firstAvailable:
      - name: huge
        deviceClassName: gpu.chandler.dev
        selectors: [{cel: {expression: 'device.capacity["chandler.dev"].memory.compareTo(quantity("10Ti")) >= 0'}}]
      - name: pair
        deviceClassName: gpu.chandler.dev
        count: 2`)+claiming("listed", "listed"))
	f := printed(t, metav1.NamespaceDefault, "listed")
	devices := devicesOf(t, metav1.NamespaceDefault, "listed")
	want := strings.Join(devices, ",")
	if got := f.variable("CHANDLER_DEVICES_LISTED_GPU_PAIR"); len(devices) != 2 || got != want || f.variable("CHANDLER_DEVICES") != want {
		t.Errorf("CHANDLER_DEVICES_LISTED_GPU_PAIR = %q, CHANDLER_DEVICES = %q; want %q", got, f.variable("CHANDLER_DEVICES"), want)
	}
	if got := f.nodes("/dev/dri/renderD"); len(got) != 2 {
		t.Errorf("render nodes %q; want two", got)
	}
}

// TestAdminAccess creates a claim with admin access. It must get all GPUs, including allocated
// ones, must not exclude other claims, and must not affect other claims when it ends.
func TestAdminAccess(t *testing.T) {
	offers(t)
	apply(t, gpuPod("owner", "0000:23:00.0"))
	running(t, "owner")
	owned := heldFor(t, "owner")

	const namespace = "monitoring"
	apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Namespace
metadata:
  name: %s
  labels: {resource.kubernetes.io/admin-access: "true"}
`, namespace))
	monitor := strings.ReplaceAll(claimed("monitor", `
      exactly: {deviceClassName: gpu.chandler.dev, allocationMode: All, adminAccess: true}`)+claiming("monitor", "monitor"),
		"metadata: {name:", "metadata: {namespace: "+namespace+", name:")
	apply(t, monitor)
	f := printed(t, namespace, "monitor")
	if got := f.nodes("/dev/dri/renderD"); len(got) != 8 {
		t.Errorf("the monitor has the render nodes %q; want eight", got)
	}
	if devices := devicesOf(t, namespace, "monitor"); !slices.Contains(devices, "pci-0000-23-00-0") {
		t.Errorf("the monitor has %q", devices)
	}

	apply(t, gpuPod("next-owner", "0000:24:00.0"))
	running(t, "next-owner")
	remove(t, monitor)
	if still := heldFor(t, "owner"); len(owned) == 0 || !slices.Equal(still, owned) {
		t.Errorf("of the owner there is %q; was %q", still, owned)
	}
	remove(t, gpuPod("owner", "0000:23:00.0"))
	remove(t, gpuPod("next-owner", "0000:24:00.0"))
	nothingHeld(t)
}

// TestClaimOfSeveralPods shares a claim between pods. The claim must stay prepared while any of
// them exists, so that a pod can start later, and another pod can end earlier.
func TestClaimOfSeveralPods(t *testing.T) {
	offers(t)
	apply(t, claimed("team", "      exactly: {deviceClassName: gpu.chandler.dev}"))
	var nodes []string
	start := func(name string) {
		t.Helper()
		apply(t, claiming(name, "team"))
		got := printed(t, metav1.NamespaceDefault, name).nodes("/dev/dri/renderD")
		if nodes == nil {
			nodes = got
		}
		if len(got) != 1 || !slices.Equal(got, nodes) {
			t.Errorf("pod %s has the render nodes %q; want those of the others, %q", name, got, nodes)
		}
	}
	for _, name := range []string{"team-1", "team-2", "team-3"} {
		start(name)
	}
	held := heldFor(t, "team")
	if err := kube.DeletePod(within(t), metav1.NamespaceDefault, "team-1"); err != nil {
		t.Fatal(err)
	}
	start("team-4")
	if still := heldFor(t, "team"); len(held) == 0 || !slices.Equal(still, held) {
		t.Errorf("of the claim there is %q; was %q", still, held)
	}
	for _, name := range []string{"team-2", "team-3", "team-4"} {
		if err := kube.DeletePod(within(t), metav1.NamespaceDefault, name); err != nil {
			t.Fatal(err)
		}
	}
	nothingHeld(t) // although the claim still exists
}

// TestClaimOfAPodGroup reserves a claim for a PodGroup. Each pod of the group must get the device.
func TestClaimOfAPodGroup(t *testing.T) {
	if !has(t, "DRAWorkloadResourceClaims") {
		t.Skip("this Kubernetes has no claims of pod groups")
	}
	offers(t)
	apply(t, claimed("crew", "      exactly: {deviceClassName: gpu.chandler.dev}")+`
apiVersion: scheduling.k8s.io/v1beta1
kind: PodGroup
metadata: {name: crew}
spec:
  schedulingPolicy: {basic: {}}
  resourceClaims: [{name: gpu, resourceClaimName: crew}]
`)
	var nodes [][]string
	for _, name := range []string{"crew-1", "crew-2"} {
		apply(t, claiming(name, "crew")+"  schedulingGroup: {podGroupName: crew}\n")
		nodes = append(nodes, printed(t, metav1.NamespaceDefault, name).nodes("/dev/dri/renderD"))
	}
	if len(nodes[0]) != 1 || !slices.Equal(nodes[0], nodes[1]) {
		t.Errorf("the pods have the render nodes %q; want the same one", nodes)
	}
	claim, err := kube.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Get(within(t), "crew", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if by := claim.Status.ReservedFor; len(by) != 1 || by[0].Resource != "podgroups" {
		t.Errorf("the claim is reserved for %v", by)
	}
	for _, name := range []string{"crew-1", "crew-2"} {
		if err := kube.DeletePod(within(t), metav1.NamespaceDefault, name); err != nil {
			t.Fatal(err)
		}
	}
	nothingHeld(t)
}

// manyShares lets 16 claims share each GPU.
const manyShares = `
sharing:
- cel: device.attributes["chandler.dev"].kind == "gpu"
  replicas: 16
`

// The number of pods that are created at once, and the number of claims of each pod.
const (
	burstPods   = 5
	burstClaims = 20
)

// TestBurstOfClaims prepares a hundred claims at once. The request limit of the agent's client must
// not delay the kubelet's calls, although the agent writes the status of each claim.
func TestBurstOfClaims(t *testing.T) {
	offers(t)
	usualAgain(t)
	reconfigure(t, besides(t, manyShares, ""))
	until(t, "shared GPUs to be offered", func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, kube)
		if err == nil {
			for name, device := range devices {
				// If the API server does not support shared devices, numbered devices are published
				// instead.
				if shared := device.AllowMultipleAllocations; shared != nil && *shared || strings.HasSuffix(name, "-share-15") {
					return nil
				}
			}
			err = errors.New("none is")
		}
		return err
	})
	var names, sources []string
	for i := range burstClaims {
		names = append(names, fmt.Sprintf("{name: c%d}", i))
		sources = append(sources, fmt.Sprintf("{name: c%d, resourceClaimTemplateName: burst}", i))
	}
	burst := `
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: burst}
spec:
  spec:
    devices:
      requests: [{name: gpu, exactly: {deviceClassName: gpu.chandler.dev}}]
`
	for i := range burstPods {
		pod := probePod(fmt.Sprintf("burst-%d", i), "[devices, wait]", "claims: ["+strings.Join(names, ", ")+"]")
		burst += "---\n" + strings.TrimRight(pod, "\n") + "\n  resourceClaims: [" + strings.Join(sources, ", ") + "]\n"
	}
	apply(t, burst)
	for i := range burstPods {
		running(t, fmt.Sprintf("burst-%d", i))
	}
	held, err := chandler.Held(node.Node)
	if err != nil {
		t.Fatal(err)
	}
	records := 0
	for _, file := range held {
		if strings.HasSuffix(file, ".record") {
			records++
		}
	}
	if records != burstPods*burstClaims {
		t.Errorf("%d claims are prepared; want %d", records, burstPods*burstClaims)
	}
	agent, err := chandler.AgentPod(within(t), kube)
	if err != nil {
		t.Fatal(err)
	}
	logs, err := kube.Logs(within(t), chandler.Namespace, agent.Name, "")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(logs) {
		if containsAll(line, []string{"client-side throttling", "NodePrepareResources"}) {
			t.Errorf("the agent made the kubelet wait: %s", line)
		}
	}
	remove(t, burst)
	nothingHeld(t)
}
