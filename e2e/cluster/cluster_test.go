package cluster_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

// programs builds the programs once.
var programs = sync.OnceValues(func() (build.Programs, error) {
	return build.Builder{Progress: os.Stderr}.Cluster(context.Background())
})

// With TEST_ROLE=caller, the test program starts a cluster and waits to be killed.
func TestMain(m *testing.M) {
	if os.Getenv("TEST_ROLE") != "caller" {
		os.Exit(m.Run())
	}
	if err := beCaller(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func beCaller(ctx context.Context) error {
	programs, err := programs()
	if err != nil {
		return err
	}
	c, err := cluster.Start(ctx, cluster.Config{Programs: programs})
	if err != nil {
		return err
	}
	if err := runPod(ctx, c, "left", "wait", corev1.PodRunning); err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(traceOf(c)); err != nil {
		return err
	}
	select {}
}

func start(t *testing.T, cfg cluster.Config) *cluster.Cluster {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	var err error
	if cfg.Programs, err = programs(); err != nil {
		t.Fatal(err)
	}
	cfg.Progress = t.Output()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := cluster.Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// pod returns the manifest of a pod that runs steps of the program probe.
func pod(name, steps, more string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  restartPolicy: Never
  containers:
  - name: probe
    image: localhost/probe:1
    imagePullPolicy: Never
    args: [%s]
%s`, name, steps, more)
}

// loadProbe loads the image of the pods into a node.
func loadProbe(ctx context.Context, n *cluster.Node) error {
	programs, err := programs()
	if err != nil {
		return err
	}
	return n.LoadImage(ctx, cluster.Image{
		Name:       "localhost/probe:1",
		Files:      map[string]string{"/bin/probe": programs.Program("probe")},
		Entrypoint: []string{"/bin/probe"},
	})
}

func runPod(ctx context.Context, c *cluster.Cluster, name, steps string, phase corev1.PodPhase) error {
	if err := loadProbe(ctx, c.Node); err != nil {
		return err
	}
	client, err := kubectl.New(c.RESTConfig())
	if err != nil {
		return err
	}
	if err := client.Apply(ctx, pod(name, steps, "")); err != nil {
		return err
	}
	_, err = client.WaitForPod(ctx, "default", name, phase)
	return err
}

func TestPods(t *testing.T) {
	c := start(t, cluster.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := runPod(ctx, c, "long", "wait", corev1.PodRunning); err != nil {
		t.Fatal(err)
	}
	client, err := kubectl.New(c.RESTConfig())
	if err != nil {
		t.Fatal(err)
	}

	t.Run("log and environment", func(t *testing.T) {
		got := succeed(t, client, pod("env", "env", `    env: [{name: ACCELERATOR, value: "0"}]`))
		if want := "env ACCELERATOR=0\n"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
	t.Run("API server through its Service", func(t *testing.T) {
		if got, want := succeed(t, client, pod("api", "api", "")), "api "+build.Version+"\n"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
	t.Run("host's devices", func(t *testing.T) {
		if _, err := os.Stat("/dev/kvm"); err != nil {
			t.Skip(err)
		}
		got := succeed(t, client, pod("kvm", "kvm", `    securityContext: {privileged: true}
    volumeMounts: [{name: dev, mountPath: /dev}]
  volumes: [{name: dev, hostPath: {path: /dev}}]`))
		if want := "kvm 12\n"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
	t.Run("a failing pod tells why", func(t *testing.T) {
		if err := client.Apply(ctx, pod("lost", "kvm", "")); err != nil {
			t.Fatal(err)
		}
		_, err := client.WaitForPod(ctx, "default", "lost", corev1.PodSucceeded)
		if err == nil || !strings.Contains(err.Error(), "ended with 1") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a second node", func(t *testing.T) { secondNode(t, c, client) })
	t.Run("kubelet restart", func(t *testing.T) { restartKubelet(t, c, client) })
	t.Run("delete", func(t *testing.T) {
		if err := client.DeletePod(ctx, "default", "long"); err != nil {
			t.Error(err)
		}
		if err := client.Delete(ctx, pod("env", "env", "")+"\n---\n"+pod("never", "env", "")); err != nil {
			t.Error(err)
		}
	})
}

// succeed runs a pod to completion and returns its log.
func succeed(t *testing.T, client *kubectl.Client, manifest string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := client.Apply(ctx, manifest); err != nil {
		t.Fatal(err)
	}
	_, name, _ := strings.Cut(manifest, "metadata: {name: ")
	name, _, _ = strings.Cut(name, "}")
	if _, err := client.WaitForPod(ctx, "default", name, corev1.PodSucceeded); err != nil {
		t.Fatal(err)
	}
	log, err := client.Logs(ctx, "default", name, "")
	if err != nil {
		t.Fatal(err)
	}
	return log
}

// secondNode adds a node, tests the connections between a pod, the API server and the kubelet,
// and removes the node.
func secondNode(t *testing.T, c *cluster.Cluster, client *kubectl.Client) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	n, err := c.AddNode(ctx, "second")
	if err != nil {
		t.Fatal(err)
	}
	if err := loadProbe(ctx, n); err != nil {
		t.Fatal(err)
	}
	if got, want := succeed(t, client, pod("api-of-second", "api", "  nodeName: second")), "api "+build.Version+"\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if err := client.Apply(ctx, pod("left-on-second", "wait", "  nodeName: second")); err != nil {
		t.Fatal(err)
	}
	if _, err := client.WaitForPod(ctx, "default", "left-on-second", corev1.PodRunning); err != nil {
		t.Fatal(err)
	}
	if err := c.RemoveNode(ctx, n); err != nil {
		t.Fatal(err)
	}
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil || len(nodes.Items) != 1 {
		t.Errorf("nodes that are left: %v, %v", nodes.Items, err)
	}
	pods, err := client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=second"})
	if err != nil || len(pods.Items) != 0 {
		t.Errorf("pods that are left: %v, %v", pods.Items, err)
	}
}

func restartKubelet(t *testing.T, c *cluster.Cluster, client *kubectl.Client) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	before, err := client.WaitForPod(ctx, "default", "long", corev1.PodRunning)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.RestartKubelet(ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.StartKubelet(ctx); err == nil {
		t.Error("a second kubelet was started")
	}
	after, err := client.WaitForPod(ctx, "default", "long", corev1.PodRunning)
	if err != nil {
		t.Fatal(err)
	}
	if was, is := before.Status.ContainerStatuses[0].ContainerID, after.Status.ContainerStatuses[0].ContainerID; was != is {
		t.Errorf("container %s became %s", was, is)
	}
}

// Two clusters on one host are independent.
func TestClustersSideBySide(t *testing.T) {
	dir := t.TempDir()
	first := start(t, cluster.Config{Dir: dir, NodeName: "first"})
	second := start(t, cluster.Config{
		NodeName:      "second",
		FeatureGates:  map[string]bool{"AllAlpha": false},
		RuntimeConfig: map[string]bool{"resource.k8s.io/v1alpha3": true},
		Kubelet:       map[string]any{"maxPods": 7},
	})
	for _, c := range []*cluster.Cluster{first, second} {
		client, err := kubectl.New(c.RESTConfig())
		if err != nil {
			t.Fatal(err)
		}
		nodes, err := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil || len(nodes.Items) != 1 || nodes.Items[0].Name != c.NodeName() {
			t.Errorf("%s: got %v, %v", c.NodeName(), nodes.Items, err)
		}
	}
	out, err := second.Kubectl(t.Context(), "get", "--raw", "/apis/resource.k8s.io/v1alpha3").CombinedOutput()
	if err != nil {
		t.Errorf("v1alpha3 on second: %v\n%s", err, out)
	}
	if err := first.Stop(); err != nil {
		t.Fatal(err)
	}
	entries, err := filepath.Glob(dir + "/*")
	if want := []string{first.LogDir()}; err != nil || !slices.Equal(entries, want) {
		t.Errorf("left in the given directory: %q, want %q", entries, want)
	}
	if out, err := second.Kubectl(t.Context(), "get", "nodes").CombinedOutput(); err != nil {
		t.Errorf("second, after first stopped: %v\n%s", err, out)
	}
}

func TestStartTellsWhatEnded(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	programs, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	before := host(t)
	_, err = cluster.Start(t.Context(), cluster.Config{Programs: programs, FeatureGates: map[string]bool{"NoSuchGate": true}})
	if err == nil || !strings.Contains(err.Error(), "kube-apiserver ended") || !strings.Contains(err.Error(), "NoSuchGate") {
		t.Errorf("got %v", err)
	}
	if after := host(t); after != before {
		t.Errorf("the host was\n%s\nand is\n%s", before, after)
	}
}

func TestStopLeavesNothing(t *testing.T) {
	before := host(t)
	c := start(t, cluster.Config{})
	if err := runPod(t.Context(), c, "left", "wait", corev1.PodRunning); err != nil {
		t.Fatal(err)
	}
	seen := traceOf(c)
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	if left := seen.remains(); left != "" {
		t.Error(left)
	}
	if after := host(t); after != before {
		t.Errorf("the host was\n%s\nand is\n%s", before, after)
	}
}

func TestKilledCallerLeavesNothing(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	before := host(t)
	caller := exec.CommandContext(t.Context(), os.Args[0])
	caller.Env = append(os.Environ(), "TEST_ROLE=caller")
	caller.Stderr = t.Output()
	stdout, err := caller.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := caller.Start(); err != nil {
		t.Fatal(err)
	}
	var seen trace
	if err := json.NewDecoder(stdout).Decode(&seen); err != nil {
		t.Fatal(err)
	}
	_ = caller.Process.Kill()
	_, _ = io.Copy(io.Discard, stdout)
	_ = caller.Wait()
	left := "not looked"
	for begin := time.Now(); left != "" && time.Since(begin) < time.Minute; time.Sleep(50 * time.Millisecond) {
		left = seen.remains()
	}
	if left != "" {
		t.Error(left)
	}
	if after := host(t); after != before {
		t.Errorf("the host was\n%s\nand is\n%s", before, after)
	}
}

// A trace distinguishes a cluster from others that run on this host at the same time.
type trace struct {
	Dir       string
	Namespace string // the PID namespace of all its processes
	Address   string
}

func traceOf(c *cluster.Cluster) trace {
	namespace, _ := os.Readlink(c.NodePath("/proc/1/ns") + "/pid")
	return trace{Dir: filepath.Dir(c.LogDir()), Namespace: namespace, Address: strings.TrimPrefix(c.RESTConfig().Host, "https://")}
}

// remains returns the first remaining part of the cluster, or "".
func (s trace) remains() string {
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, process := range processes {
		if namespace, err := os.Readlink(process + "/ns/pid"); err == nil && namespace == s.Namespace {
			return process
		}
	}
	if _, err := os.Stat(s.Dir); err == nil {
		return s.Dir
	}
	if conn, err := net.Dial("tcp", s.Address); err == nil {
		_ = conn.Close()
		return "listener " + s.Address
	}
	return ""
}

// host describes everything on this host that a cluster could leave behind: mounts, network
// interfaces, cgroups, and files in the directories of a node.
func host(t *testing.T) string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	state := []string{string(mounts)}
	for _, pattern := range []string{
		"/sys/class/net/*", "/sys/fs/cgroup/chandler-e2e-*", "/sys/fs/cgroup/*/chandler-e2e-*", "/run/*", "/etc/cni/*", "/etc/cdi/*",
		"/var/lib/*", "/var/log/*", "/usr/libexec/*", "/opt/*", filepath.Join(os.TempDir(), "chandler-e2e-*"),
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		state = append(state, found...)
	}
	for name := range map[string]bool{"vm/overcommit_memory": true, "kernel/panic": true, "kernel/panic_on_oops": true, "net/ipv4/ip_forward": true} {
		value, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			t.Fatal(err)
		}
		state = append(state, name+" "+strings.TrimSpace(string(value)))
	}
	slices.Sort(state)
	return strings.Join(state, "\n")
}
