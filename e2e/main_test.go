// Package e2e tests Chandler on a real Kubernetes, which it starts once for
// all tests: one node that stands in a recorded server with eight GPUs and four
// NPUs that can be divided, beside the devices of the machine that the tests run
// on. The flags say which Kubernetes; tests ask it for the feature gates that
// what they expect depends on.
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

// patience is how long any one thing may take.
const patience = 2 * time.Minute

// The hosts that the node stands in for.
const (
	eightGPUs = "discovery/families/amdgpu/testdata/mi210x8.host" // two under each PCIe root
	fourNPUs  = "discovery/families/neuron/testdata/inf1.host"    // of four cores each; one is being reset
)

// moreVersions are off by default: those of resource.k8s.io that users may still
// write, and those that Kubernetes has pod groups, and 1.34 device taints, in.
var moreVersions = map[string]bool{
	"resource.k8s.io/v1beta1":   true,
	"resource.k8s.io/v1beta2":   true,
	"resource.k8s.io/v1alpha3":  true,
	"scheduling.k8s.io/v1beta1": true,
}

// podGroups are the gates for claims of pod groups, beta and off by default.
const podGroups = "GenericWorkload,DRAWorkloadResourceClaims"

var (
	version = flag.String("kubernetes", build.Version, "run on this version, one of "+strings.Join(build.Versions(), ", "))
	gates   = flag.String("gates", podGroups, "feature gates to switch on, with commas between")
)

// All tests use these. They are set before the first test and only read later.
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
	ctx, cancel := context.WithTimeout(context.Background(), 40*time.Minute) // a first build takes its time
	defer cancel()
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
	config := cluster.Config{Programs: programs, Progress: os.Stderr, FeatureGates: switchedOn(), PodSecurity: "baseline"}
	if *version != build.Classic { // which does not know these
		config.RuntimeConfig = moreVersions
	}
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

// has reports whether the cluster has a feature gate, and has it on, by the API
// server's word.
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

// within returns a context that ends when patience does. Unlike the test's own
// it serves the test's clean-up too.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	t.Cleanup(cancel)
	return ctx
}

// until waits until something is so.
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

// remove deletes a manifest's objects, if they are still there.
func remove(t *testing.T, manifest string) {
	t.Helper()
	if err := kube.Delete(within(t), manifest); err != nil {
		t.Error(err)
	}
}

// example returns a manifest of deployments/examples.
func example(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(project.Manifest(filepath.Join("examples", name)))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// nothingHeld waits until neither a CDI spec nor a record is left.
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
