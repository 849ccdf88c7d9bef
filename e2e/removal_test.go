package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
)

// testRemoval removes the agents of two nodes. The removal must be refused, with the pod's name,
// while a pod of the second node has a device. Afterwards it must succeed, and nothing of the
// agents may remain on either node. At the end of the test the agents come back.
func testRemoval(t *testing.T, second *cluster.Node) {
	program := pluginProgram(t) // its build may take longer than a command may
	uninstall := func() (string, error) {
		out, err := exec.CommandContext(within(t), program, "uninstall", "--timeout=1m", "--kubeconfig", node.Kubeconfig()).CombinedOutput()
		return string(out), err
	}
	until(t, "no other pod to have a device", func(ctx context.Context) error {
		pods, err := kube.CoreV1().Pods(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{LabelSelector: loadLabel})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d pods of the Deployment are there", len(pods.Items))
		}
		return err
	})
	steady := keep(t, "removal", []string{secondNode})
	began := time.Now()
	out, err := uninstall()
	if err == nil || !strings.Contains(out, "node second: pod default/removal-on-second") {
		t.Errorf("with a pod that has a device of the second node: %v\n%s", err, out)
	}
	t.Logf("the removal was refused within %s", time.Since(began).Round(100*time.Millisecond))
	for _, name := range []string{node.NodeName(), secondNode} {
		classicAre(t, name, allGPUs)
	}
	steady.unharmed(t)
	steady.end(t)

	t.Cleanup(func() {
		if out, err := node.Kubectl(within(t), "-n", chandler.Namespace, "annotate", "configmap", chandler.DaemonSet, "chandler.dev/removal-").CombinedOutput(); err != nil {
			t.Errorf("annotate: %v\n%s", err, out)
		}
		if err := chandler.WaitForAgent(within(t), kube); err != nil {
			t.Error(err)
		}
	})
	began = time.Now()
	if out, err := uninstall(); err != nil {
		t.Fatalf("uninstall: %v\n%s", err, out)
	}
	t.Logf("the agents of two nodes left within %s", time.Since(began).Round(100*time.Millisecond))
	for _, n := range []*cluster.Node{node.Node, second} {
		left, err := chandler.Left(n)
		if err != nil || len(left) > 0 {
			t.Errorf("on node %s there is left %q, %v", n.NodeName(), left, err)
		}
	}
	slices, err := kube.ResourceV1().ResourceSlices().List(within(t), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + chandler.Driver})
	if err != nil || len(slices.Items) > 0 {
		t.Errorf("there are %d slices left, %v", len(slices.Items), err)
	}
}
