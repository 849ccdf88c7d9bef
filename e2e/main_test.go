// Package e2e tests Chandler on a real Kubernetes, which is started once for all tests. The cluster
// has one node. The node simulates a recorded server with eight GPUs and four divisible NPUs, in
// addition to the devices of the machine that runs the tests. Flags select the version of
// Kubernetes. Tests whose expectations depend on a feature gate read the gate from the API server.
package e2e

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

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

// patience is the time limit of each single step. After a failed Prepare, a kubelet tries again 60 to 90 s
// later, and several clusters may share the machine.
const patience = 5 * time.Minute

// The recorded hosts that the node simulates.
const (
	eightGPUs = "discovery/families/amdgpu/testdata/mi210x8.host" // two under each PCIe root
	fourNPUs  = "discovery/families/neuron/testdata/inf1.host"    // four cores in each; one NPU is in reset
)

// moreVersions are API versions that are off by default. Users may still write the beta versions of
// resource.k8s.io. The other versions contain pod groups, and the device taints of 1.34.
var moreVersions = map[string]bool{
	"resource.k8s.io/v1beta1":   true,
	"resource.k8s.io/v1beta2":   true,
	"resource.k8s.io/v1alpha3":  true,
	"scheduling.k8s.io/v1beta1": true,
}

// podGroups are the gates for claims of pod groups, which are beta and off by default.
const podGroups = "GenericWorkload,DRAWorkloadResourceClaims"

var (
	version = flag.String("kubernetes", build.Version, "run on this version, one of "+strings.Join(build.Versions(), ", "))
	gates   = flag.String("gates", podGroups, "feature gates to switch on, with commas between")
)

// TestMain sets these variables before the first test. Tests only read them.
var (
	project chandler.Project
	node    *cluster.Cluster
	kube    *kubectl.Client
)

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	if os.Getuid() != 0 {
		return 0, errors.New("needs root, for the namespaces, mounts and cgroups that Kubernetes runs in")
	}
	ctx := context.Background() // The builds have no limit. The first one takes 10 to 40 minutes, and shows progress.
	builder := build.Builder{Kubernetes: *version, Progress: os.Stderr}
	programs, err := builder.Cluster(ctx)
	if err != nil {
		return 0, err
	}
	dir, err := filepath.Abs("..")
	if err != nil {
		return 0, err
	}
	if project, err = chandler.Build(ctx, builder, programs, dir); err != nil {
		return 0, err
	}
	config := cluster.Config{Programs: programs, Progress: os.Stderr, FeatureGates: switchedOn(), PodSecurity: "baseline", Audit: []string{agentUser}}
	if *version != build.Classic { // no resource.k8s.io
		config.RuntimeConfig = moreVersions
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 15*time.Minute, errors.New("the cluster was not ready within 15 minutes"))
	defer cancel()
	if node, err = cluster.Start(ctx, config); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, node.Stop()) }()
	if kube, err = kubectl.New(node.RESTConfig()); err != nil {
		return 0, err
	}
	err = errors.Join(
		project.LoadImages(ctx, node.Node),
		project.Simulate(ctx, node.Node, filepath.Join(dir, eightGPUs), filepath.Join(dir, fourNPUs)),
		project.Install(ctx, kube, "examples/config-kvm-classic.yaml"),
	)
	if err != nil {
		return 0, err
	}
	return m.Run(), nil
}

func switchedOn() map[string]bool {
	on := make(map[string]bool)
	for gate := range strings.SplitSeq(*gates, ",") {
		if gate != "" {
			on[gate] = true
		}
	}
	return on
}

// has reports whether the API server has a feature gate and the gate is on. The source is the
// server's metrics.
func has(t *testing.T, gate string) bool {
	t.Helper()
	metrics, err := kube.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(within(t))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(metrics)) {
		if strings.HasPrefix(line, `kubernetes_feature_enabled{name="`+gate+`",`) {
			return strings.HasSuffix(strings.TrimSpace(line), " 1")
		}
	}
	return false
}

// within returns a context that ends after patience. Unlike the test's own context, it remains
// valid in the test's clean-up.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	t.Cleanup(cancel)
	return ctx
}

// until calls the function is repeatedly until the function returns no error, and fails the test
// after patience.
func until(t *testing.T, what string, is func(context.Context) error) {
	t.Helper()
	if err := kube.Until(within(t), what, is); err != nil {
		t.Fatal(err)
	}
}

// apply applies a manifest and deletes it when the test ends.
func apply(t *testing.T, manifest string) {
	t.Helper()
	t.Cleanup(func() { remove(t, manifest) })
	if err := kube.Apply(within(t), manifest); err != nil {
		t.Fatal(err)
	}
}

// remove deletes those objects of a manifest that still exist.
func remove(t *testing.T, manifest string) {
	t.Helper()
	if err := kube.Delete(within(t), manifest); err != nil {
		t.Error(err)
	}
}

// example returns a manifest from deployments/examples.
func example(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(project.Manifest(filepath.Join("examples", name)))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// nothingHeld waits until all CDI specs and records are removed.
func nothingHeld(t *testing.T) {
	t.Helper()
	until(t, "CDI specs and records to be gone", func(context.Context) error {
		held, err := chandler.Held(node.Node)
		if err == nil && len(held) > 0 {
			err = fmt.Errorf("still there: %q", held)
		}
		return err
	})
}
