package chart

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

// patience is the time limit of each single step.
const patience = 2 * time.Minute

// eightGPUs is the recorded host that the node simulates.
const eightGPUs = "discovery/families/amdgpu/testdata/mi210x8.host"

// classicGPU offers one of the GPUs by the device plugin API.
const classicGPU = `
config:
  resources:
  - name: example.com/gpu
    mode: DevicePlugin
    cel: device.attributes["resource.kubernetes.io"].?pciBusID.orValue("") == "0000:a3:00.0"
`

const draPod = `
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: train}
spec:
  devices:
    requests:
    - name: gpu
      exactly: {deviceClassName: gpu.chandler.dev}
---
apiVersion: v1
kind: Pod
metadata: {name: by-claim}
spec:
  resourceClaims: [{name: gpu, resourceClaimName: train}]
  containers:
  - name: probe
    image: chandler.dev/probe:latest
    imagePullPolicy: Never
    args: [devices, wait]
    resources: {claims: [{name: gpu}]}
`

const classicPod = `
apiVersion: v1
kind: Pod
metadata: {name: by-limits}
spec:
  containers:
  - name: probe
    image: chandler.dev/probe:latest
    imagePullPolicy: Never
    args: [devices, wait]
    resources: {limits: {example.com/gpu: 1}}
`

// installed is a cluster for the chart.
type installed struct {
	t       *testing.T
	project chandler.Project
	node    *cluster.Cluster
	kube    *kubectl.Client
	helm    chandler.Helm
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// start starts a cluster with the images and a simulated host.
func start(t *testing.T) *installed {
	t.Helper()
	in := startOn(t, cluster.Config{})
	if err := in.project.Simulate(t.Context(), in.node.Node, filepath.Join(in.project.Dir, eightGPUs)); err != nil {
		t.Fatal(err)
	}
	return in
}

// startOn starts a cluster with the images. Without root, the test is skipped.
func startOn(t *testing.T, config cluster.Config) *installed {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, for namespaces, mounts and control groups")
	}
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	builder := build.Builder{Progress: os.Stderr}
	programs, err := builder.Cluster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	in := &installed{t: t}
	if in.project, err = chandler.Build(t.Context(), builder, programs, dir); err != nil {
		t.Fatal(err)
	}
	config.Programs, config.Progress = programs, os.Stderr
	if in.node, err = cluster.Start(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := in.node.Stop(); err != nil {
			t.Error(err)
		}
	})
	if in.kube, err = kubectl.New(in.node.RESTConfig()); err != nil {
		t.Fatal(err)
	}
	in.helm = chandler.Helm{Program: program, Kubeconfig: in.node.Kubeconfig(), Home: t.TempDir()}
	err = errors.Join(
		in.project.LoadImages(t.Context(), in.node.Node),
		in.project.LoadAgent(t.Context(), in.node.Node, otherImage),
	)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

const otherImage = "registry.example.com/chandler:other"

// run runs Helm and fails the test if Helm fails.
func (in *installed) run(values string, args ...string) string {
	in.t.Helper()
	begin := time.Now()
	out, err := in.helm.Run(within(in.t), values, args...)
	if err != nil {
		in.t.Fatal(err)
	}
	in.t.Logf("helm %s took %s", args[0], time.Since(begin).Round(time.Second))
	return out
}

// devices returns the names of the devices in slices.
func (in *installed) devices() []string {
	in.t.Helper()
	devices, err := chandler.Devices(within(in.t), in.kube)
	if err != nil {
		in.t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(devices))
}

// offers waits until slices have the given number of GPUs and the device plugin API offers one GPU.
func (in *installed) offers(gpus int) {
	in.t.Helper()
	err := in.kube.Until(within(in.t), "the GPUs to be offered", func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, in.kube)
		if err != nil {
			return err
		}
		found := 0
		for name := range devices {
			if strings.HasPrefix(name, "pci-") {
				found++
			}
		}
		node, err := in.kube.CoreV1().Nodes().Get(ctx, "node", metav1.GetOptions{})
		if classic := node.Status.Allocatable["example.com/gpu"]; err == nil && (found != gpus || classic.Value() != 1) {
			return fmt.Errorf("there are %d GPUs by DRA and %s by the device-plugin API", found, classic.String())
		}
		return err
	})
	if err != nil {
		in.t.Fatal(err)
	}
}

// TestLife installs, upgrades and rolls back the chart while pods have devices. A removal must be
// refused as long as a pod has a device, must name the pods, and must change nothing. Afterwards
// the removal must succeed and leave nothing on the node.
func TestLife(t *testing.T) {
	in := start(t)
	before := in.left()
	values := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(values, []byte(chandler.SimulatedValues), 0o600); err != nil {
		t.Fatal(err)
	}
	chart := in.project.Chart()
	in.run(classicGPU, "install", "chandler", chart, "--create-namespace", "--values="+values, "--values=-", "--wait", "--timeout=1m")
	in.offers(7)
	if err := in.kube.Apply(within(t), draPod+"---"+classicPod); err != nil {
		t.Fatal(err)
	}
	for _, pod := range []string{"by-claim", "by-limits"} {
		if _, err := in.kube.WaitForPod(within(t), metav1.NamespaceDefault, pod, corev1.PodRunning); err != nil {
			t.Fatal(err)
		}
	}
	offered := in.devices()

	in.run("", "upgrade", "chandler", chart, "--reset-then-reuse-values", "--set=image.tag=other", "--wait", "--timeout=1m")
	in.hasImage(otherImage)
	in.run("", "rollback", "chandler", "1", "--wait", "--timeout=1m")
	in.hasImage(chandler.AgentImage)
	if now := in.devices(); !slices.Equal(now, offered) {
		t.Errorf("after an upgrade and a rollback slices have %q, before %q", now, offered)
	}

	in.refused("pod default/by-claim (claim default/train) has pci-")
	if now := in.devices(); !slices.Equal(now, offered) {
		t.Errorf("after a refused removal slices have %q, before %q", now, offered)
	}
	in.remove(draPod)
	in.refused("node node: pod default/by-limits")
	in.offers(7)
	in.remove(classicPod)
	t.Log(in.run("", "uninstall", "chandler", "--wait"))
	if left := in.left(); !slices.Equal(left, before) {
		t.Errorf("on the node and in the API server there is %q; before the installation there was %q", left, before)
	}

	// The chart can be installed again. Agents that have left their nodes return when the order is
	// withdrawn.
	in.run(classicGPU, "install", "chandler", chart, "--values="+values, "--values=-", "--wait", "--timeout=1m")
	in.offers(7)
	in.kubectl("apply", "-f", in.project.Manifest("examples/uninstall.yaml"))
	in.kubectl("-n", chandler.Namespace, "wait", "--for=condition=complete", "--timeout=1m", "job/chandler-uninstall")
	in.kubectl("delete", "-f", in.project.Manifest("examples/uninstall.yaml"))
	in.kubectl("-n", chandler.Namespace, "annotate", "configmap", "chandler", "chandler.dev/removal-")
	in.offers(7)

	// Without hooks, only the remains that docs/install.md lists may be left.
	in.run("", "uninstall", "chandler", "--no-hooks", "--wait")
	err := in.kube.Until(within(in.t), "the agents' pods to end", func(ctx context.Context) error {
		pods, err := in.kube.CoreV1().Pods(chandler.Namespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("there is pod %s", pods.Items[0].Name)
		}
		return err
	})
	if err != nil {
		in.t.Fatal(err)
	}
	for _, left := range in.left() {
		if left != chandler.StateDir && !strings.HasPrefix(left, chandler.RunDir+"/") && left != chandler.HostDir+"/features/chandler" && !strings.HasPrefix(left, "ResourceSlice ") && !strings.HasPrefix(left, chandler.CDIDir+"/chandler.dev-") {
			t.Errorf("without hooks there is also left %q", left)
		}
	}
	in.kustomized()
}

// kubectl runs kubectl and fails the test if kubectl fails.
func (in *installed) kubectl(args ...string) {
	in.t.Helper()
	if out, err := in.node.Kubectl(within(in.t), args...).CombinedOutput(); err != nil {
		in.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// refused runs helm uninstall, which must fail with the given reason and remove nothing.
func (in *installed) refused(why string) {
	in.t.Helper()
	begin := time.Now()
	out, err := in.helm.Run(within(in.t), "", "uninstall", "chandler")
	in.t.Logf("helm uninstall, which was refused, took %s", time.Since(begin).Round(time.Second))
	if err == nil || !strings.Contains(out, why) {
		in.t.Errorf("helm uninstall: error %v; it does not say %q:\n%s", err, why, out)
	}
	if err := chandler.WaitForAgent(within(in.t), in.kube); err != nil {
		in.t.Error(err)
	}
}

func (in *installed) remove(manifest string) {
	in.t.Helper()
	if err := in.kube.Delete(within(in.t), manifest); err != nil {
		in.t.Fatal(err)
	}
}

// hasImage waits until the only agent runs the image.
func (in *installed) hasImage(image string) {
	in.t.Helper()
	if err := chandler.WaitForAgent(within(in.t), in.kube); err != nil {
		in.t.Fatal(err)
	}
	err := in.kube.Until(within(in.t), "one agent to run", func(ctx context.Context) error {
		pod, err := chandler.AgentPod(ctx, in.kube)
		if err == nil && pod.Spec.Containers[0].Image != image {
			err = fmt.Errorf("its image is %s", pod.Spec.Containers[0].Image)
		}
		return err
	})
	if err != nil {
		in.t.Fatal(err)
	}
}

// left returns everything of Chandler on the node and in the API server, except the namespace,
// which Helm keeps.
func (in *installed) left() []string {
	in.t.Helper()
	left, err := chandler.Left(in.node.Node)
	if err != nil {
		in.t.Fatal(err)
	}
	ctx := within(in.t)
	slices, err := in.kube.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		in.t.Fatal(err)
	}
	for _, slice := range slices.Items {
		left = append(left, "ResourceSlice "+slice.Name)
	}
	node, err := in.kube.CoreV1().Nodes().Get(ctx, "node", metav1.GetOptions{})
	if err != nil {
		in.t.Fatal(err)
	}
	for _, words := range []map[string]string{node.Labels, node.Annotations} {
		for name := range words {
			if strings.Contains(name, "chandler") {
				left = append(left, "node: "+name)
			}
		}
	}
	for _, taint := range node.Spec.Taints {
		left = append(left, "taint "+taint.Key)
	}
	for name, err := range map[string]error{
		"DaemonSet":   get(in.kube.AppsV1().DaemonSets(chandler.Namespace).Get(ctx, "chandler", metav1.GetOptions{})),
		"ConfigMap":   get(in.kube.CoreV1().ConfigMaps(chandler.Namespace).Get(ctx, "chandler", metav1.GetOptions{})),
		"Job":         get(in.kube.BatchV1().Jobs(chandler.Namespace).Get(ctx, "chandler-uninstall", metav1.GetOptions{})),
		"ClusterRole": get(in.kube.RbacV1().ClusterRoles().Get(ctx, "chandler-uninstall", metav1.GetOptions{})),
		"Class":       get(in.kube.ResourceV1().DeviceClasses().Get(ctx, "gpu.chandler.dev", metav1.GetOptions{})),
		"Policy":      get(in.kube.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(ctx, "slices.chandler.dev", metav1.GetOptions{})),
	} {
		if !apierrors.IsNotFound(err) {
			left = append(left, fmt.Sprintf("%s: %v", name, err))
		}
	}
	return left
}

// get drops the result of a call and returns the error.
func get(_ any, err error) error { return err }
