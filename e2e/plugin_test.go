package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/cmd/kubectl-chandler/kubectl/reporttest"
	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
)

// pluginProgram returns the path of the kubectl plugin.
func pluginProgram(t *testing.T) string {
	t.Helper()
	program, err := project.Plugin()
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// plugin runs "kubectl chandler" as an administrator does: kubectl finds the plugin in the PATH.
func plugin(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	dir, program := t.TempDir(), pluginProgram(t)
	for _, name := range []string{"kubectl-chandler", "kubectl_complete-chandler"} {
		if err := os.Symlink(program, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	kubectl := node.Kubectl(within(t))
	cmd := exec.CommandContext(within(t), kubectl.Path, append([]string{"kubectl"}, args...)...)
	if filepath.Base(kubectl.Path) == "kubectl" {
		cmd.Args = append([]string{kubectl.Path}, args...)
	}
	cmd.Env = append(kubectl.Env, "PATH="+dir+":"+os.Getenv("PATH"), "KUBECONFIG="+node.Kubeconfig())
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		t.Fatal(err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

// why runs "kubectl chandler why" for a pod, and checks the exit code and the words in the output.
func why(t *testing.T, pod string, code int, words ...string) {
	t.Helper()
	stdout, stderr, got := plugin(t, "chandler", "why", pod)
	if got != code || stderr != "" && code < 2 {
		t.Errorf("kubectl chandler why %s: exit code %d, want %d; standard error %q\n%s", pod, got, code, stderr, stdout)
	}
	text := strings.Join(strings.Fields(stdout), " ")
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("kubectl chandler why %s does not say %q:\n%s", pod, word, stdout)
		}
	}
	if code == 1 && strings.Contains(text, "are to be had on") {
		t.Errorf("the scheduler has no node for %s, and kubectl chandler says there is one:\n%s", pod, stdout)
	}
}

// gpusPod returns a pod with a claim for GPUs under constraints.
func gpusPod(name string, count int, constraints string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
    - name: gpus
      exactly: {deviceClassName: amdgpu.chandler.dev, count: %[2]d}
%[3]s
---
%[4]s
  resourceClaims: [{name: gpus, resourceClaimName: %[1]s}]
`, name, count, constraints, strings.TrimSpace(probePod(name, "[env, wait]", "claims: [{name: gpus}]")))
}

// TestWhyPodsWait compares "kubectl chandler why" with the scheduler. The command must report the
// reason for each unschedulable pod, and the node once the pod is scheduled.
func TestWhyPodsWait(t *testing.T) {
	if *version == build.Classic {
		t.Skip("no resource.k8s.io")
	}
	offers(t)
	const held = "0000:23:00.0"
	holder := gpuPod("why-holder", held)
	apply(t, holder)
	running(t, "why-holder")
	pods := map[string]struct {
		manifest string
		says     []string
	}{
		"why-selector": {gpuPod("why-selector", "0000:ff:00.0"), []string{"do not pass", "0000:ff:00.0", "0 left"}},
		"why-many":     {gpusPod("why-many", 9, ""), []string{"8 devices of the class, on one node", "-1 allocated default/why-holder", "7 left"}},
		"why-held":     {gpuPod("why-held", held), []string{"-1 allocated default/why-holder", "kubectl -n default delete pod why-holder"}},
		"why-numa": {gpusPod("why-numa", 5, `    constraints: [{matchAttribute: resource.kubernetes.io/numaNode}]`),
			[]string{"7 left, and nowhere 5 on one NUMA node", "nearest: node, NUMA node", "has 4"}},
		"why-limits": {probePod("why-limits", "[wait]", "limits: {amd.com/gpu: 9}"), []string{"limits amd.com/gpu: 9"}},
		"why-nobody": {probePod("why-nobody", "[wait]", "limits: {example.com/none: 1}"), []string{"and no DeviceClass has that name"}},
	}
	for _, pod := range pods {
		apply(t, pod.manifest)
	}
	for name, pod := range pods {
		waits(t, name)
		why(t, name, 1, pod.says...)
	}
	why(t, "why-holder", 0, "default/why-holder runs on node", "■ 23:00.0")
	why(t, "no-such-pod", 2)

	for name, pod := range pods {
		if name != "why-held" {
			remove(t, pod.manifest)
		}
	}
	t.Run("sick", testWhySick)
	remove(t, holder)
	running(t, "why-held")
	why(t, "why-held", 0, "■ 23:00.0")
	testWho(t)
	remove(t, pods["why-held"].manifest)
	nothingHeld(t)
}

// testWhySick hides the device node of a GPU for a while.
func testWhySick(t *testing.T) {
	if !has(t, "DRADeviceTaints") {
		t.Skip("without taints sick devices are not published")
	}
	const address, name = "0000:43:00.0", "pci-0000-43-00-0"
	host := node.NodePath(chandler.HostDir)
	render, err := filepath.Glob(filepath.Join(host, "sys/bus/pci/devices", address, "drm/renderD*"))
	if err != nil || len(render) != 1 {
		t.Fatalf("render nodes of %s: %q, %v", address, render, err)
	}
	device, aside := filepath.Join(host, "dev/dri", filepath.Base(render[0])), filepath.Join(host, "aside")
	rename(t, device, aside)
	t.Cleanup(func() {
		if _, err := os.Stat(aside); err == nil {
			rename(t, aside, device)
		}
	})
	tainted(t, name, "chandler.dev/node-missing")
	pod := gpuPod("why-sick", address)
	apply(t, pod)
	waits(t, "why-sick")
	why(t, "why-sick", 1, "-1 node-missing node 43:00.0", "chandler explain CH0305")
	rename(t, aside, device)
	running(t, "why-sick")
	remove(t, pod)
}

// testWho checks the commands who and top while a pod has a GPU.
func testWho(t *testing.T) {
	t.Helper()
	for _, word := range []string{node.NodeName(), "why-held", "23:00.0"} {
		stdout, stderr, code := plugin(t, "chandler", "who", word)
		if code != 0 || stderr != "" || !strings.Contains(stdout, "default/why-held") || !strings.Contains(stdout, "gpu 23:00.0") {
			t.Errorf("kubectl chandler who %s: exit code %d, %q\n%s", word, code, stderr, stdout)
		}
	}
	until(t, "kubectl chandler top to count the GPUs", func(context.Context) error {
		stdout, stderr, code := plugin(t, "chandler", "top", "-o", "json")
		var top struct {
			Models []struct {
				Kind                   string
				Free, Allocated, Total int
			}
		}
		if err := json.Unmarshal([]byte(stdout), &top); err != nil || code != 0 {
			return fmt.Errorf("exit code %d, %v, %s", code, err, stderr)
		}
		for _, m := range top.Models {
			if m.Kind == "gpu" && m.Total == 8 && m.Allocated == 1 && m.Free == 7 {
				return nil
			}
		}
		return fmt.Errorf("it says\n%s", stdout)
	})
	stdout, _, _ := plugin(t, "__complete", "chandler", "who", "nod")
	if !strings.Contains(stdout, node.NodeName()) {
		t.Errorf("kubectl completes the word nod to\n%s", stdout)
	}
}

// TestReport creates a report of the cluster. It must contain the node's recorded host, the agent's
// log and the agent's metrics, and neither identities of devices nor credentials.
func TestReport(t *testing.T) {
	if *version == build.Classic {
		t.Skip("no resource.k8s.io")
	}
	offers(t)
	devices, err := chandler.Devices(t.Context(), kube)
	if err != nil {
		t.Fatal(err)
	}
	var private []string
	for _, d := range devices {
		for _, name := range []resourceapi.QualifiedName{"uuid", "serial"} {
			if value := d.Attributes[name].StringValue; value != nil && len(*value) > 5 {
				private = append(private, *value)
			}
		}
	}
	if len(private) == 0 {
		t.Fatal("no device has an identity")
	}
	file := filepath.Join(t.TempDir(), "report.tar.gz")
	stdout, stderr, code := plugin(t, "chandler", "report", node.NodeName(), "-f", file)
	if code != 0 {
		t.Fatalf("exit code %d: %s\n%s", code, stderr, stdout)
	}
	t.Log(stdout)
	archive, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	files := reporttest.UnpackArchive(t, archive)
	for _, want := range []string{"cluster/resourceslices.json", "nodes/node/recorded.host", "nodes/node/agent.log", "nodes/node/metrics.txt", "config/daemonset-chandler.json"} {
		if files[want] == "" {
			t.Errorf("the report lacks %s:\n%s", want, stdout)
		}
	}
	for name, content := range files {
		for _, secret := range append(private, "eyJhbGciOi", "PRIVATE KEY") {
			if strings.Contains(content, secret) {
				t.Errorf("%s has %q in it", name, secret)
			}
		}
	}
	host := filepath.Join(t.TempDir(), "recorded.host")
	if err := os.WriteFile(host, []byte(files["nodes/node/recorded.host"]), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(within(t), project.Agent, "discover", host).CombinedOutput()
	if err != nil || strings.Count(string(out), "MI210") != 8 {
		t.Errorf("the recorded host of the report: %v\n%s", err, out)
	}
}

// TestPluginMigrate runs the agent's migrate command in its pod.
func TestPluginMigrate(t *testing.T) {
	stdout, stderr, code := plugin(t, "chandler", "migrate", "status", node.NodeName())
	if code != 0 || !strings.HasPrefix(stdout, "DEVICE ") || !strings.Contains(stdout, "amd.com/gpu") {
		t.Errorf("status: exit code %d, %q\n%s", code, stderr, stdout)
	}
	_, stderr, code = plugin(t, "chandler", "migrate", "plan", node.NodeName(), "--to=Sometimes")
	if code != 1 || !strings.Contains(stderr, "Sometimes") {
		t.Errorf("plan with an unknown mode: exit code %d, %q", code, stderr)
	}
}
