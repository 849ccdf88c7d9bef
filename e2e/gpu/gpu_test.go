// Package gpu tests Chandler with the NVIDIA GPUs of this machine, on a real Kubernetes and with
// the machine's own /sys, /proc and /dev. The tests compute on a GPU, but change none of its
// settings. On a machine without an NVIDIA GPU, they are skipped.
package gpu

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

var (
	driverRoot = flag.String("driver-root", "", "installation `directory` of the NVIDIA driver; the default is the first of the usual directories with a driver")
	logs       = flag.String("logs", "", "write the logs of the agent and of Kubernetes to this `directory`, in its folder log")
	patience   = flag.Duration("patience", 45*time.Second, "time limit of each single step")
	withoutGPU = flag.Bool("without-gpu", false, "on any machine, run the parts that need no GPU, with the device tun in place of a GPU")
)

// installed is a cluster on this machine, and the agent's programs and manifests.
type installed struct {
	host    host
	project chandler.Project
	node    *cluster.Cluster
	kube    *kubectl.Client
	cuda    string // path of vectoradd, or ""
}

// TestGPU installs the agent in its usual configurations for NVIDIA GPUs, one after the other.
func TestGPU(t *testing.T) {
	if *withoutGPU {
		in := start(t, host{})
		t.Run("Cluster", in.testCluster)
		return
	}
	in := start(t, findHost(t))
	t.Run("Unprivileged", in.testUnprivileged)
	t.Run("NVML", in.testNVML)
	t.Run("Attributes", in.testAttributes)
	t.Run("Labels", in.testLabels)
	t.Run("Claim", in.testClaim)
	t.Run("Limits", in.testLimits)
	t.Run("Turns", in.testTurns)
	t.Run("NoGPU", in.testNoGPU)
	t.Run("Shares", in.testShares)
	t.Run("Memory", in.testMemory)
	t.Run("DevicePlugin", in.testDevicePlugin)
	t.Run("Removal", in.testRemoval)
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), *patience)
	t.Cleanup(cancel)
	return ctx
}

// start starts a cluster with the images of the agent and of pods.
func start(t *testing.T, h host) *installed {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root, for the namespaces, mounts and cgroups that Kubernetes runs in")
	}
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	in := &installed{host: h}
	builder := build.Builder{Progress: os.Stderr}
	programs, err := builder.Cluster(t.Context()) // The first build takes long.
	if err == nil {
		in.project, err = chandler.Build(t.Context(), builder, programs, dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	nvml, nvmlErr := builder.NVML(t.Context(), dir)
	in.cuda, err = compileVectorAdd(t.Context(), t.TempDir())
	if err := errors.Join(nvmlErr, err); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	config := cluster.Config{Programs: programs, Progress: os.Stderr, PodSecurity: "baseline", Dir: *logs}
	if in.node, err = cluster.Start(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	t.Logf("the cluster started in %s", time.Since(begin).Round(time.Millisecond))
	t.Cleanup(func() {
		in.saveAgentLog(t)
		if err := in.node.Stop(); err != nil {
			t.Error(err)
		}
	})
	if in.kube, err = kubectl.New(in.node.RESTConfig()); err != nil {
		t.Fatal(err)
	}
	err = errors.Join(
		in.project.LoadImages(t.Context(), in.node.Node),
		in.loadAgentImage(t.Context(), nvml),
		in.loadUserImage(t.Context(), in.cuda),
	)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// install applies the agent's manifests with a configuration and with patches of the DaemonSet, and
// waits until the agent runs. config are the fields of the DriverConfig.
func (in *installed) install(t *testing.T, config string, patches ...string) {
	t.Helper()
	in.saveAgentLog(t)
	begin := time.Now()
	file := filepath.Join(t.TempDir(), "config.yaml")
	config = "    apiVersion: chandler.dev/v1alpha1\n    kind: DriverConfig\n" + indented(config)
	if err := os.WriteFile(file, []byte(configMap+config), 0o644); err != nil {
		t.Fatal(err)
	}
	patches = append([]string{fmt.Sprintf(commonPatch, t.Name())}, patches...)
	if err := in.project.InstallHere(within(t), in.kube, file, patches...); err != nil {
		t.Fatal(err)
	}
	t.Logf("the agent was installed in %s", time.Since(begin).Round(time.Millisecond))
}

// commonPatch makes the agent's log more verbose. Its annotation differs for each configuration,
// and therefore replaces the pod: a running agent reads a new ConfigMap after a minute only.
const commonPatch = `
spec:
  template:
    metadata: {annotations: {test: %q}}
    spec:
      containers:
      - name: chandler
        args: [` + agentArgs + `]
`

const agentArgs = "run, --host-root=/host, --config=/etc/chandler/config.yaml, --healthz-bind-address=:8080, -v=4"

const configMap = `
apiVersion: v1
kind: ConfigMap
metadata: {name: chandler, namespace: chandler}
data:
  config.yaml: |
`

// indented returns the lines of a configuration with the indentation in configMap.
func indented(config string) string {
	var lines strings.Builder
	for line := range strings.Lines(config) {
		lines.WriteString("    " + line)
	}
	return lines.String()
}

// saveAgentLog appends the agent's log to the directory of logs.
func (in *installed) saveAgentLog(t *testing.T) {
	t.Helper()
	if in.kube == nil || *logs == "" {
		return
	}
	pods, err := in.kube.CoreV1().Pods(chandler.Namespace).List(within(t), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=chandler"})
	if err != nil {
		t.Log(err)
		return
	}
	file, err := os.OpenFile(filepath.Join(in.node.LogDir(), "agent.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Log(err)
		return
	}
	defer file.Close()
	for _, pod := range pods.Items {
		log, err := in.kube.Logs(within(t), pod.Namespace, pod.Name, "")
		if err != nil {
			log = err.Error()
		}
		fmt.Fprintf(file, "=== %s, when %s began to replace or stop it\n%s\n", pod.Name, t.Name(), log)
	}
}

// deviceIs waits until the agent's ResourceSlices have a device that is accepted, and returns its
// attributes and capacities as text. A device that several claims can share has "shared".
func (in *installed) deviceIs(t *testing.T, what string, accept func(name string, attributes map[string]string) bool) map[string]string {
	t.Helper()
	var found map[string]string
	err := in.kube.Until(within(t), what, func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, in.kube)
		if err != nil {
			return err
		}
		for name, device := range devices {
			attributes := make(map[string]string)
			if ptr.Deref(device.AllowMultipleAllocations, false) {
				attributes["shared"] = "true"
			}
			for attribute, value := range device.Attributes {
				switch {
				case value.StringValue != nil:
					attributes[string(attribute)] = *value.StringValue
				case value.VersionValue != nil:
					attributes[string(attribute)] = *value.VersionValue
				case value.IntValue != nil:
					attributes[string(attribute)] = fmt.Sprint(*value.IntValue)
				}
			}
			for capacity, value := range device.Capacity {
				attributes["capacity:"+string(capacity)] = fmt.Sprint(value.Value.Value())
			}
			if accept(name, attributes) {
				found = attributes
				return nil
			}
		}
		return fmt.Errorf("the slices have %v", devices)
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// apply applies a manifest and deletes it when the test ends.
func (in *installed) apply(t *testing.T, manifest string) {
	t.Helper()
	t.Cleanup(func() { in.remove(t, manifest) })
	if err := in.kube.Apply(within(t), manifest); err != nil {
		t.Fatal(err)
	}
}

// remove deletes those objects of a manifest that still exist.
func (in *installed) remove(t *testing.T, manifest string) {
	t.Helper()
	if err := in.kube.Delete(within(t), manifest); err != nil {
		t.Error(err)
	}
}

// run applies a manifest, waits until its pod is in a phase, and logs how long that took.
func (in *installed) run(t *testing.T, manifest, pod string, phase corev1.PodPhase) {
	t.Helper()
	begin := time.Now()
	in.apply(t, manifest)
	in.waitFor(t, pod, phase)
	t.Logf("pod %s was %s %s after its creation", pod, phase, time.Since(begin).Round(time.Millisecond))
}

func (in *installed) waitFor(t *testing.T, pod string, phase corev1.PodPhase) {
	t.Helper()
	_, err := in.kube.WaitForPod(within(t), metav1.NamespaceDefault, pod, phase)
	if err == nil {
		return
	}
	log, logErr := in.kube.Logs(within(t), metav1.NamespaceDefault, pod, "")
	t.Fatalf("%v\nlog: %s %v", err, log, logErr)
}

// prints waits until the log of a pod contains all words, and returns the log.
func (in *installed) prints(t *testing.T, pod string, words ...string) string {
	t.Helper()
	var log string
	err := in.kube.Until(within(t), "the log of pod "+pod, func(ctx context.Context) (err error) {
		if log, err = in.kube.Logs(ctx, metav1.NamespaceDefault, pod, ""); err != nil {
			return err
		}
		for _, word := range words {
			if !strings.Contains(log, word) {
				return fmt.Errorf("no %q in it", word)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	return log
}

// waits checks that a pod has no node, although the scheduler has tried.
func (in *installed) waits(t *testing.T, name string) {
	t.Helper()
	err := in.kube.Until(within(t), "the scheduler to refuse pod "+name, func(ctx context.Context) error {
		pod, err := in.kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
				return nil
			}
		}
		if pod.Spec.NodeName != "" {
			return kubectl.Final(errors.New("it has a node"))
		}
		return errors.New("it has no condition yet")
	})
	if err != nil {
		t.Fatal(err)
	}
}
