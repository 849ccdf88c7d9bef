package gpu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"chandler.dev/e2e/chandler"
)

// doctorIsContent runs doctor in the agent's pod and on the node. Neither may find a fault.
func (in *installed) doctorIsContent(t *testing.T) {
	t.Helper()
	for where, cmd := range map[string]*exec.Cmd{
		"in the agent's pod": in.node.Kubectl(within(t), "exec", "-n", chandler.Namespace, "daemonset/"+chandler.DaemonSet, "--", "/chandler", "doctor"),
		"on the node": in.node.Command(within(t), in.project.Agent, "doctor",
			"--node-name", in.node.NodeName(), "--kubeconfig", "/etc/kubernetes/kubelet.kubeconfig"),
	} {
		out, err := cmd.CombinedOutput()
		t.Logf("doctor %s:\n%s", where, out)
		if err != nil {
			t.Errorf("doctor %s: %v", where, err)
		}
	}
}

// asks runs a command of kubectl chandler. The output must contain the words.
func (in *installed) asks(t *testing.T, args []string, words ...string) {
	t.Helper()
	plugin, err := in.project.Plugin()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(within(t), plugin, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+in.node.Kubeconfig())
	out, err := cmd.CombinedOutput()
	t.Logf("kubectl chandler %s:\n%s", strings.Join(args, " "), out)
	if err != nil {
		t.Errorf("kubectl chandler %s: %v", strings.Join(args, " "), err)
	}
	for _, word := range words {
		if !strings.Contains(string(out), word) {
			t.Errorf("kubectl chandler %s does not print %q", strings.Join(args, " "), word)
		}
	}
}

// duration matches the sums and counts of the durations of calls.
var duration = regexp.MustCompile(`(?m)^chandler_(dra|device_plugin)_duration_seconds_(sum|count)(\{.*\}) (.*)$`)

// measure logs the mean duration of the agent's calls, and the memory of its processes.
func (in *installed) measure(t *testing.T) {
	t.Helper()
	pod, err := chandler.AgentPod(within(t), in.kube)
	if err != nil {
		t.Fatal(err)
	}
	metrics, err := in.kube.CoreV1().RESTClient().Get().Namespace(pod.Namespace).Resource("pods").Name(pod.Name + ":8080").
		SubResource("proxy").Suffix("metrics").DoRaw(within(t))
	if err != nil {
		t.Fatal(err)
	}
	sums := make(map[string]float64)
	for _, match := range duration.FindAllStringSubmatch(string(metrics), -1) {
		value, err := strconv.ParseFloat(match[4], 64)
		if err != nil {
			t.Fatal(err)
		}
		calls := match[1] + match[3]
		if match[2] == "sum" {
			sums[calls] = value
		} else if value > 0 {
			t.Logf("duration of %s: %.2f ms, mean of %.0f", calls, 1000*sums[calls]/value, value)
		}
	}
	for _, line := range strings.Split(string(metrics), "\n") {
		if strings.HasPrefix(line, "chandler_device_info{") || strings.HasPrefix(line, "chandler_scan_duration_seconds_sum") || strings.HasPrefix(line, "chandler_scan_duration_seconds_count") {
			t.Log(line)
		}
	}
	for _, residence := range in.residences(t) {
		t.Log(residence)
	}
}

// residences returns the resident memory of the agent and of chandler-host.
func (in *installed) residences(t *testing.T) []string {
	t.Helper()
	proc := in.node.NodePath("/proc")
	entries, err := os.ReadDir(proc)
	if err != nil {
		t.Fatal(err)
	}
	var residences []string
	for _, entry := range entries {
		line, err := os.ReadFile(filepath.Join(proc, entry.Name(), "cmdline"))
		if err != nil || !strings.HasPrefix(string(line), "/chandler") {
			continue
		}
		status, err := os.ReadFile(filepath.Join(proc, entry.Name(), "status"))
		if err != nil {
			continue // The process has ended.
		}
		memory := regexp.MustCompile(`(?m)^(VmRSS|RssAnon):\s+.*$`).FindAllString(string(status), -1)
		command := strings.Join(strings.SplitN(string(line), "\x00", 3)[:2], " ")
		residences = append(residences, command+": "+strings.Join(strings.Fields(strings.Join(memory, ", ")), " "))
	}
	return residences
}

// testCluster runs what needs no GPU, to try this test on any machine.
func (in *installed) testCluster(t *testing.T) {
	in.install(t, "mode: Auto\n", servicePatch)
	in.installHostService(t)
	in.deviceIs(t, "tun to be offered", func(name string, _ map[string]string) bool { return name == "tun" })
	manifest := claimPod("with-tun", "tun.chandler.dev", "", "/probe env devices mounts; exec /probe wait")
	in.run(t, manifest, "with-tun", corev1.PodRunning)
	t.Log(in.prints(t, "with-tun", "/dev/net/tun", "wait"))
	in.asks(t, []string{"top"}, "tun")
	in.asks(t, []string{"who", "with-tun"}, "tun")
	in.asks(t, []string{"why", "with-tun"}, "with-tun")
	in.doctorIsContent(t)
	in.measure(t)
	in.remove(t, manifest)
	in.nothingHeld(t)
	in.testNoGPU(t)
	in.testRemoval(t)
}

// nothingHeld waits until the CDI specs and records of all claims are removed.
func (in *installed) nothingHeld(t *testing.T) {
	t.Helper()
	err := in.kube.Until(within(t), "CDI specs and records to be removed", func(context.Context) error {
		held, err := chandler.Held(in.node.Node)
		if err == nil && len(held) > 0 {
			err = fmt.Errorf("there are still %q", held)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// testRemoval follows the instructions for removal. Nothing may be left on the node.
func (in *installed) testRemoval(t *testing.T) {
	in.saveAgentLog(t)
	if err := in.kube.ApplyFiles(within(t), in.project.Manifest("examples/uninstall.yaml")); err != nil {
		t.Fatal(err)
	}
	out, err := in.node.Kubectl(within(t), "-n", chandler.Namespace, "wait", "--for=condition=complete", "--timeout="+patience.String(), "job/chandler-uninstall").CombinedOutput()
	if err != nil {
		log, _ := in.node.Kubectl(within(t), "-n", chandler.Namespace, "logs", "job/chandler-uninstall").CombinedOutput()
		t.Fatalf("%v\n%s\n%s", err, out, log)
	}
	left, err := chandler.Left(in.node.Node)
	if err != nil || len(left) > 0 {
		t.Errorf("on the node are left %q, %v", left, err)
	}
}
