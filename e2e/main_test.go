// Package e2e tests Chandler on a real Kubernetes, which it starts once for
// all tests: one node that stands in a recorded server with eight GPUs, beside
// the devices of the machine that the tests run on.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

// patience is how long any one thing may take.
const patience = 2 * time.Minute

// eightGPUs is a server with eight GPUs, two under each PCIe root.
const eightGPUs = "discovery/families/amdgpu/testdata/mi210x8.host"

// moreVersions are those of resource.k8s.io that users may still write, and that
// of pod groups. They are off by default.
var moreVersions = map[string]bool{"resource.k8s.io/v1beta1": true, "resource.k8s.io/v1beta2": true, "scheduling.k8s.io/v1beta1": true}

// podGroups are the gates for claims of pod groups, beta and off by default.
var podGroups = map[string]bool{"GenericWorkload": true, "DRAWorkloadResourceClaims": true}

// What all tests use. It is set before the first and only read by them.
var (
	project chandler.Project
	node    *cluster.Cluster
	kube    *kubectl.Client
)

func TestMain(m *testing.M) {
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
	builder := build.Builder{Progress: os.Stderr}
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
	if node, err = cluster.Start(ctx, cluster.Config{Programs: programs, Progress: os.Stderr, RuntimeConfig: moreVersions, FeatureGates: podGroups}); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, node.Stop()) }()
	if kube, err = kubectl.New(node.RESTConfig()); err != nil {
		return 0, err
	}
	err = errors.Join(
		project.LoadImages(ctx, node),
		project.Simulate(ctx, node, filepath.Join(dir, eightGPUs)),
		project.Install(ctx, kube, "examples/config-kvm-classic.yaml"),
	)
	if err != nil {
		return 0, err
	}
	return m.Run(), nil
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
		held, err := chandler.Held(node)
		if err == nil && len(held) > 0 {
			err = fmt.Errorf("still there: %q", held)
		}
		return err
	})
}
