package e2e

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
)

// needy declares the overhead of GPUs on the host.
const needy = `
overhead:
- cel: device.attributes["chandler.dev"].kind == "gpu"
  perPod: {memory: 16Mi}
  perContainer: {cpu: 10m}
`

// TestFieldsThatTheServerKeeps compares the features that the agent finds at the API server with
// the server's gates, and expects the published slices to be kept unchanged.
func TestFieldsThatTheServerKeeps(t *testing.T) {
	offers(t)
	usualAgain(t)
	reconfigure(t, besides(t, needy, ""))
	server := gatesOfServer(t)
	found := gatesFound(t)
	for gate, kept := range found {
		enabled := server[gate] // false for gates that are unknown to an older server
		if strings.HasPrefix(gate, "DRA") && kept != enabled {
			t.Errorf("%s: the agent finds %v, the server says %v", gate, kept, enabled)
		}
	}
	if len(found) < 9 {
		t.Errorf("the agent tells of %v only", found)
	}
	t.Logf("found: %v", found)
	until(t, "GPUs to be published with what is kept", func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, kube)
		if err != nil {
			return err
		}
		if n := countGPUs(devices); n != 8 {
			return fmt.Errorf("there are %d GPUs", n)
		}
		for name, device := range devices {
			if isGPU(device) {
				if err := checkFields(device, found); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
			}
		}
		return nil
	})
	testCharged(t, found["DRANodeAllocatableResources"])
}

// checkFields checks that a GPU has the fields that the API server keeps, and no others.
func checkFields(device resourceapi.Device, found map[string]bool) error {
	_, needs := device.NodeAllocatableResources["memory"]
	if needs != found["DRANodeAllocatableResources"] {
		return fmt.Errorf("its overhead is published: %v", needs)
	}
	links, linked := device.Attributes["linkedTo"] // Each GPU has links to three others, or none.
	if list := links.StringValues != nil; linked && list != found["DRAListTypeAttributes"] {
		return fmt.Errorf("its links are a list: %v", list)
	}
	return nil
}

// testCharged runs a pod with a GPU, and checks whether the overhead is charged to the pod.
func testCharged(t *testing.T, kept bool) {
	pod := gpuPod("needy", "0000:43:00.0")
	apply(t, pod)
	running(t, "needy")
	got, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(within(t), "needy", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if charged := len(got.Status.NodeAllocatableResourceClaimStatuses) > 0; charged != kept {
		t.Errorf("the pod is charged: %v; %v", charged, got.Status.NodeAllocatableResourceClaimStatuses)
	}
	remove(t, pod)
	nothingHeld(t)
}

// gatesOfServer returns the feature gates from the metrics of the API server.
func gatesOfServer(t *testing.T) map[string]bool {
	t.Helper()
	text, err := kube.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return switches(text, regexp.MustCompile(`^kubernetes_feature_enabled\{name="([^"]*)".*\} ([01])$`))
}

// gatesFound waits for the agent's metric of features of the API server, and returns the features.
func gatesFound(t *testing.T) (found map[string]bool) {
	t.Helper()
	until(t, "the agent's metric of what the API server keeps", func(ctx context.Context) error {
		agent, err := chandler.AgentPod(ctx, kube)
		if err != nil {
			return err
		}
		text, err := kube.CoreV1().Pods(chandler.Namespace).ProxyGet("http", agent.Name, "8080", "metrics", nil).DoRaw(ctx)
		if err != nil {
			return err
		}
		found = switches(text, regexp.MustCompile(`^chandler_dra_server_feature_enabled\{feature="([^"]*)"\} ([01])$`))
		if len(found) == 0 {
			return fmt.Errorf("it is not there: %s", strings.TrimSpace(string(text)))
		}
		return nil
	})
	return found
}

// switches returns the values of the matching lines of metrics, by the first group of the pattern.
func switches(metrics []byte, line *regexp.Regexp) map[string]bool {
	out := make(map[string]bool)
	scanner := bufio.NewScanner(bytes.NewReader(metrics))
	scanner.Buffer(nil, len(metrics)+1)
	for scanner.Scan() {
		if m := line.FindStringSubmatch(scanner.Text()); m != nil {
			out[m[1]] = m[2] == "1"
		}
	}
	return out
}
