package chart

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
)

// twoGPUs is the recorded host for MPS daemons, with an A100 and an L40S.
const (
	twoGPUs    = "discovery/families/nvidia/testdata/mps.host"
	a100GPU    = "pci-0000-01-00-0"
	l40sGPU    = "pci-0000-41-00-0"
	a100UUID   = "GPU-7c1e0a01-2b41-4e0b-9c37-0b6f3d9ae401"
	l40sUUID   = "GPU-7c1e0a41-2b41-4e0b-9c37-0b6f3d9ae441"
	driverDir  = "/var/lib/chandler/driver" // NVIDIA's driver is installed here.
	daemonsDir = chandler.StateDir + "/sharing-daemons/nvidia"
)

// keptValues allow MPS daemons and time slices on that host.
const keptValues = `
image: {repository: registry.example.com/chandler, tag: v0.1.0}
sharingDaemons: {enabled: true, driverRoot: ` + driverDir + `}
hostPaths:
  sys: ` + chandler.HostDir + `/sys
  proc: ` + chandler.HostDir + `/proc
  dev: ` + chandler.HostDir + `/dev
  features: ` + chandler.HostDir + `/features
extraArgs: [--runtime-root=` + chandler.HostDir + `, --rescan-interval=250ms]
log: {verbosity: 4}
config:
  onDemand:
    mps:
    - cel: device.attributes["chandler.dev"].kind == "gpu"
    timeSlices:
    - cel: device.attributes["chandler.dev"].kind == "gpu"
`

const privilegedNamespace = `
apiVersion: v1
kind: Namespace
metadata:
  name: ` + chandler.Namespace + `
  labels: {pod-security.kubernetes.io/enforce: privileged}
`

// mpsImage contains the probe and nvidia-cuda-mps-control, which CUDA images get from the driver.
const mpsImage = "chandler.dev/mps:latest"

// kept is a cluster with the supervisor: chandler-host, which runs the daemons of claims.
type kept struct{ *privileged }

// testKeptUp installs the chart with the supervisor and a fake of NVIDIA's MPS daemon. While pods
// use the daemon, the test kills the agent and the supervisor, alone and with their pods.
func testKeptUp(t *testing.T, p *privileged) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("there is no C compiler to build chandler-host with")
	}
	k := kept{p}
	k.layOut()
	p.apply(privilegedNamespace)
	said := p.run(keptValues, "install", "chandler", p.project.Chart(), "--create-namespace", "--values=-")
	if want := "chandler-sharing-daemons are privileged"; !strings.Contains(said, want) {
		t.Errorf("the notes do not say %q:\n%s", want, said)
	}
	if err := chandler.WaitForAgent(within(t), p.kube); err != nil {
		t.Fatal(err)
	}
	k.supervised()
	p.healthy(a100GPU, l40sGPU)
	if out := p.doctor(); !strings.Contains(out, "CH0617") || strings.Contains(strings.ReplaceAll(out, "CH0617", ""), "CH0") {
		t.Errorf("doctor finds other than that NVML is off\n%s", out)
	}
	if _, err := os.Lstat(p.node.NodePath(chandler.HostDir + "/dev/termination-log")); err == nil {
		t.Error("the host has /dev/termination-log")
	}
	for _, step := range []struct {
		name string
		do   func(kept)
	}{
		{"shared", kept.shared}, {"agent killed", kept.agentKilled}, {"supervisor killed", kept.supervisorKilled},
		{"removed", kept.removed}, {"time slice", kept.timeSlice}, {"without", kept.without},
	} {
		began := time.Now()
		step.do(k)
		t.Logf("%s: %s", step.name, time.Since(began).Round(100*time.Millisecond))
	}
	p.run("", "uninstall", "chandler", "--wait")
	if left := p.left(); len(left) > 0 {
		t.Errorf("there is left %q", left)
	}
}

// layOut creates the host and a driver root with fakes of NVIDIA's programs, and loads the images.
func (k kept) layOut() {
	k.t.Helper()
	builder := build.Builder{Progress: os.Stderr}
	nvml, err := builder.MockedNVML(k.t.Context(), k.project.Dir)
	if err != nil {
		k.t.Fatal(err)
	}
	fake, err := builder.Static(k.t.Context(), k.project.Dir, "chandler.dev/cmd/chandler-host/sharing/testdata/fake")
	if err != nil {
		k.t.Fatal(err)
	}
	if err := k.project.Simulate(within(k.t), k.node.Node, filepath.Join(k.project.Dir, twoGPUs)); err != nil {
		k.t.Fatal(err)
	}
	program, err := os.ReadFile(fake)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, dir := range []string{driverDir + "/usr/bin", driverDir + "/tmp", driverDir + "/dev", driverDir + "/proc", chandler.HostDir + "/dev/shm", chandler.HostDir + "/var/lib"} {
		err = errors.Join(err, os.MkdirAll(k.node.NodePath(dir), 0o755))
	}
	for _, name := range []string{"nvidia-cuda-mps-control", "nvidia-smi"} {
		err = errors.Join(err, os.WriteFile(k.node.NodePath(driverDir+"/usr/bin/"+name), program, 0o755))
	}
	// By --runtime-root, the agent expects all paths of containers below the simulated host.
	err = errors.Join(err, os.Symlink("/var/lib/kubelet", k.node.NodePath(chandler.HostDir+"/var/lib/kubelet")))
	if out, nodeErr := k.node.Command(within(k.t), "sh", "-c", "test -e $1 || mknod $1 c 1 3", "sh", chandler.HostDir+"/dev/null").CombinedOutput(); nodeErr != nil {
		err = errors.Join(err, fmt.Errorf("make /dev/null: %w: %s", nodeErr, out))
	}
	err = errors.Join(err,
		k.node.LoadImage(within(k.t), cluster.Image{
			Name: chandler.AgentImage + "-host", Files: map[string]string{"/chandler": k.project.Agent, "/chandler-host": nvml}, Entrypoint: []string{"/chandler"},
		}),
		k.node.LoadImage(within(k.t), cluster.Image{
			Name: mpsImage, Files: map[string]string{"/probe": k.project.Probe, "/usr/bin/nvidia-cuda-mps-control": fake}, Entrypoint: []string{"/probe"},
		}),
	)
	if err != nil {
		k.t.Fatal(err)
	}
}

// claimOf returns a claim for a GPU with parameters.
func claimOf(name, device, parameters string) string {
	manifest, _, _ := strings.Cut(pod(name, device, true), "\n---\n")
	return strings.Replace(manifest, "driver: vfio", parameters, 1)
}

// user returns a pod whose containers use a claim.
func user(name, claim string, containers ...string) string {
	manifest := `
---
apiVersion: v1
kind: Pod
metadata: {name: ` + name + `}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: ` + claim + `}]
  containers:`
	for _, container := range containers {
		manifest += `
  - name: ` + container + `
    image: ` + mpsImage + `
    imagePullPolicy: Never
    args: [env, devices, wait]
    env: [{name: WHO, value: ` + name + "-" + container + `}]
    resources: {claims: [{name: gpu}]}`
	}
	return manifest + "\n"
}

func (k kept) runs(pods ...string) {
	k.t.Helper()
	for _, pod := range pods {
		if _, err := k.kube.WaitForPod(within(k.t), metav1.NamespaceDefault, pod, corev1.PodRunning); err != nil {
			k.tell(k.t)
			k.t.Fatal(err)
		}
	}
}

// supervised waits until the supervisor runs in a pod other than the excluded ones, and returns the
// pod.
func (k kept) supervised(not ...types.UID) (pod corev1.Pod) {
	k.t.Helper()
	k.until("the supervisor to run", func(ctx context.Context) error {
		pods, err := k.kube.CoreV1().Pods(chandler.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=chandler-sharing-daemons"})
		if err != nil {
			return err
		}
		if len(pods.Items) != 1 || slices.Contains(not, pods.Items[0].UID) || pods.Items[0].DeletionTimestamp != nil ||
			len(pods.Items[0].Status.ContainerStatuses) != 1 || !pods.Items[0].Status.ContainerStatuses[0].Ready {
			return fmt.Errorf("%d pods", len(pods.Items))
		}
		pod = pods.Items[0]
		_, err = os.Lstat(k.node.NodePath(daemonsDir + "/socket"))
		return err
	})
	return pod
}

// processesOf returns the node's processes that have a given environment variable and a command
// line with a given prefix.
func (k kept) processesOf(variable, begins string) (found []string) {
	for process, line := range k.processes() {
		environ, _ := os.ReadFile(k.node.NodePath("/proc") + "/" + process + "/environ")
		if strings.HasPrefix(line, begins) && strings.Contains("\x00"+string(environ), "\x00"+variable) {
			found = append(found, process)
		}
	}
	return found
}

// daemons returns the processes of a claim's daemons.
func (k kept) daemons(claim string) []string {
	return k.processesOf("CHANDLER_SHARING_CLAIM="+k.dirOf(claim)+"\x00", "nvidia-cuda-mps-control\x00-f\x00")
}

// dirOf returns the supervisor's directory of a claim.
func (k kept) dirOf(claim string) string {
	k.t.Helper()
	now, err := k.kube.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Get(within(k.t), claim, metav1.GetOptions{})
	if err != nil {
		k.t.Fatal(err)
	}
	return daemonsDir + "/" + string(now.UID)
}

// another waits until a claim has exactly one daemon, which differs from before, and returns the
// daemon's process.
func (k kept) another(claim, before string) (now string) {
	k.t.Helper()
	k.until("a daemon of claim "+claim, func(context.Context) error {
		all := k.daemons(claim)
		if len(all) != 1 || all[0] == before {
			return fmt.Errorf("there are %q, and before there was %q", all, before)
		}
		now = all[0]
		return nil
	})
	return now
}

// child waits until exactly one supervisor process runs, which differs from before, and returns the
// process.
func (k kept) child(before string) (now string) {
	k.t.Helper()
	k.until("a supervisor", func(context.Context) error {
		all := k.processesOf("CHANDLER_SHARING_CHILD=1\x00", "/chandler-host\x00--sharing-daemons=")
		if len(all) != 1 || all[0] == before {
			return fmt.Errorf("there are %q, and before there was %q", all, before)
		}
		now = all[0]
		return nil
	})
	return now
}

// parentOf returns the parent of a process. The command line does not identify the parent, because
// the parent may have just forked another process.
func (k kept) parentOf(process string) string {
	k.t.Helper()
	status, err := os.ReadFile(k.node.NodePath("/proc") + "/" + process + "/status")
	if err != nil {
		k.t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(status), "\nPPid:")
	parent, _, _ := strings.Cut(after, "\n")
	return strings.TrimSpace(parent)
}

// kill kills a process of the node.
func (k kept) kill(process string) {
	k.t.Helper()
	if out, err := k.node.Command(within(k.t), "kill", "-9", process).CombinedOutput(); err != nil {
		k.t.Fatalf("kill: %v: %s", err, out)
	}
}

// says sends a command to the daemon through the pipe of a container, and returns the answer.
func (k kept) says(container, command string) (string, error) {
	all := k.processesOf("WHO="+container+"\x00", "/probe\x00")
	if len(all) != 1 {
		return "", fmt.Errorf("%d processes of container %s", len(all), container)
	}
	conn, err := net.DialTimeout("unix", k.node.NodePath("/proc")+"/"+all[0]+"/root/tmp/nvidia-mps/control", time.Second)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if _, err := fmt.Fprintln(conn, command); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(conn)
	return strings.TrimSpace(string(answer)), err
}

// The containers that use the daemon of claim "train".
var users = []string{"first-a", "first-b", "second-a"}

// serves waits until all containers reach the same daemon, with the limits of the claim.
func (k kept) serves() {
	k.t.Helper()
	k.until("the daemon to serve all containers", func(context.Context) error {
		for command, want := range map[string]string{
			"get_default_active_thread_percentage":            "40.0",
			"get_default_device_pinned_mem_limit " + a100UUID: "4096M",
			"get_server_list": "",
		} {
			for _, container := range users {
				got, err := k.says(container, command)
				if want == "" && err == nil && got != "" {
					want = got // The other containers must get the same answer.
				}
				if err != nil || got != want {
					return fmt.Errorf("container %s: %s: %q, %w; want %q", container, command, got, err, want)
				}
			}
		}
		return nil
	})
}

// managed compares the calls of nvidia-smi since the last check with want.
func (k kept) managed(want ...string) {
	k.t.Helper()
	log := k.node.NodePath(chandler.HostDir + "/dev/smi.log")
	said, err := os.ReadFile(log)
	if got := strings.Split(strings.TrimSpace(string(said)), "\n"); err != nil || !slices.Equal(got, want) {
		k.t.Errorf("nvidia-smi: %q, %v\nwant %q", got, err, want)
	}
	_ = os.Remove(log) // The next check must not see these calls.
}

// nothing waits until no process, directory or mount of any claim remains.
func (k kept) nothing() {
	k.t.Helper()
	k.until("nothing to be left for claims", func(context.Context) error {
		left := k.processesOf("CHANDLER_SHARING_CLAIM=", "")
		entries, err := os.ReadDir(k.node.NodePath(daemonsDir))
		for _, entry := range entries {
			if entry.IsDir() {
				left = append(left, entry.Name())
			}
		}
		mounts, mountsErr := os.ReadFile(k.node.NodePath("/proc") + "/1/mountinfo")
		for line := range strings.Lines(string(mounts)) {
			if strings.Contains(line, daemonsDir) {
				left = append(left, line)
			}
		}
		if err = errors.Join(err, mountsErr); err == nil && len(left) > 0 {
			err = fmt.Errorf("there are %q", left)
		}
		return err
	})
}

// shared runs three containers in two pods, which must use one daemon.
func (k kept) shared() {
	k.t.Helper()
	k.apply(claimOf("train", a100GPU, "mps: {memoryMiB: 4096}, computePercentage: 40") + user("first", "train", "a", "b") + user("second", "train", "a"))
	k.runs("first", "second")
	k.serves()
	k.managed("-i " + a100UUID + " -c EXCLUSIVE_PROCESS")
	for _, container := range []string{"a", "b"} {
		said, err := k.kube.Logs(within(k.t), metav1.NamespaceDefault, "first", container)
		if want := "env CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps\n"; err != nil || !strings.Contains(said, want) {
			k.t.Errorf("container %s: %v; it does not say %q:\n%s", container, err, want, said)
		}
	}
	// Call the daemon as a user does, and check the shared memory of daemon and containers.
	cmd := k.node.Kubectl(within(k.t), "exec", "-i", "second", "--", "/usr/bin/nvidia-cuda-mps-control")
	cmd.Stdin = strings.NewReader("get_default_active_thread_percentage\n")
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "40.0\n" {
		k.t.Errorf("in the pod the daemon answers %q, %v", out, err)
	}
	for _, container := range users {
		for _, process := range k.processesOf("WHO="+container+"\x00", "/probe\x00") {
			if text, err := os.ReadFile(k.node.NodePath("/proc") + "/" + process + "/root/dev/shm/of-mps-daemon"); string(text) != a100UUID || err != nil {
				k.t.Errorf("container %s: shared memory: %q, %v", container, text, err)
			}
		}
	}
}

// agentKilled kills the agent while one claim has a daemon and the daemon of another claim is
// starting. The first daemon must keep running. The end of the second claim must leave nothing
// behind.
func (k kept) agentKilled() {
	k.t.Helper()
	before := k.another("train", "")
	behaviour := k.node.NodePath(driverDir + "/behaviour")
	if err := os.WriteFile(behaviour, []byte("slow\n"), 0o600); err != nil {
		k.t.Fatal(err)
	}
	late := claimOf("late", l40sGPU, "mps: {}") + user("late", "late", "a")
	k.apply(late)
	k.another("late", "")
	k.killAgent()
	if err := os.Remove(behaviour); err != nil {
		k.t.Error(err)
	}
	k.remove(late)
	k.until("nothing to be left of the claim that was begun", func(context.Context) error {
		if all := k.processesOf("CHANDLER_SHARING_CLAIM=", "nvidia-cuda-mps-control\x00-f\x00"); !slices.Equal(all, []string{before}) {
			return fmt.Errorf("there are daemons %q, want %q", all, before)
		}
		return nil
	})
	k.serves()
}

// supervisorKilled kills the supervisor, then its parent process, and deletes its pod. The parent
// restarts the supervisor and the daemon keeps running. The end of the parent ends the container
// and the daemons. A new supervisor must start ended daemons again, and containers must find the
// new daemons at the same place.
func (k kept) supervisorKilled() {
	k.t.Helper()
	before := k.another("train", "")
	child := k.child("")
	k.kill(child)
	child = k.child(child)
	k.serves()
	if now := k.another("train", ""); now != before {
		k.t.Errorf("daemon %s serves, and before %s did", now, before)
	}
	k.kill(before) // The new supervisor must notice the end of this daemon.
	before = k.another("train", before)
	k.serves()

	pod := k.supervised()
	if n := pod.Status.ContainerStatuses[0].RestartCount; n != 0 {
		k.t.Errorf("the container was started again %d times", n)
	}
	k.kill(k.parentOf(child))
	before = k.another("train", before)
	k.serves()
	if n := k.supervised().Status.ContainerStatuses[0].RestartCount; n != 1 {
		k.t.Errorf("the container was started again %d times", n)
	}

	k.kubectl("delete", "pod", "-n", chandler.Namespace, pod.Name)
	k.supervised(pod.UID)
	k.another("train", before)
	k.serves()
}

// removed ends the claim, one pod after the other.
func (k kept) removed() {
	k.t.Helper()
	before := k.another("train", "")
	k.remove(user("first", "train", "a", "b"))
	if now := k.another("train", ""); now != before {
		k.t.Errorf("daemon %s serves the second pod, and before %s did", now, before)
	}
	_ = os.Remove(k.node.NodePath(chandler.HostDir + "/dev/smi.log")) // The log contains each start of a daemon.
	k.remove(claimOf("train", a100GPU, "") + user("second", "train", "a"))
	k.nothing()
	k.managed("-i " + a100UUID + " -c DEFAULT")
}

// timeSlice sets a time slice for a claim, which must be reset at the end of the claim.
func (k kept) timeSlice() {
	k.t.Helper()
	manifest := claimOf("turns", l40sGPU, "timeSlice: Medium") + user("turns", "turns", "a")
	k.apply(manifest)
	k.runs("turns")
	k.managed("compute-policy -i " + l40sUUID + " --set-timeslice=2")
	k.remove(manifest)
	k.nothing()
	k.managed("compute-policy -i " + l40sUUID + " --set-timeslice=0")
}

// without creates a claim that needs a daemon while no supervisor runs. An Event of the pod must
// name the chart's value, and the pod must be deletable.
func (k kept) without() {
	k.t.Helper()
	k.kubectl("delete", "daemonset", "-n", chandler.Namespace, "chandler-sharing-daemons", "--cascade=foreground")
	manifest := claimOf("vain", a100GPU, "mps: {}") + user("vain", "vain", "a")
	k.apply(manifest)
	k.until("an Event that names sharingDaemons.enabled", func(ctx context.Context) error {
		events, err := k.kube.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=vain"})
		if err != nil {
			return err
		}
		var all []string
		for i := range events.Items {
			if strings.Contains(events.Items[i].Message, "does not run on this node; in the chart, sharingDaemons.enabled runs it") {
				return nil
			}
			all = append(all, events.Items[i].Message)
		}
		return fmt.Errorf("there are %q", all)
	})
	k.remove(manifest)
	k.nothing()
}
