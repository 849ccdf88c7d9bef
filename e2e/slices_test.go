package e2e

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"chandler.dev/e2e/chandler"
)

// An agent may have ResourceSlices of its own node, pool and driver, and of no
// other. It is put to the API server as whoever has the agent's token would.
func TestAgentIsKeptToItsNode(t *testing.T) {
	offers(t)
	own := node.NodeName()
	slice := func(node, pool, driver string) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "kept-"},
			Spec: resourceapi.ResourceSliceSpec{
				NodeName: &node, Driver: driver, Pool: resourceapi.ResourcePool{Name: pool, Generation: 1, ResourceSliceCount: 1},
			},
		}
	}
	tests := map[string]struct {
		token string // the node in it
		slice *resourceapi.ResourceSlice
		want  string
	}{
		"its own":          {own, slice(own, own, chandler.Driver), ""},
		"another node's":   {own, slice("other", "other", chandler.Driver), "of that node"},
		"another pool":     {own, slice(own, "other", chandler.Driver), "of that node"},
		"another driver's": {own, slice(own, own, "gpu.nvidia.com"), "driver chandler.dev"},
		"by another agent": {"other", slice(own, own, chandler.Driver), "of that node"},
		"by no node's":     {"", slice(own, own, chandler.Driver), "names no node"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := agentOf(t, test.token).ResourceV1().ResourceSlices().Create(within(t), test.slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if test.want == "" && err != nil {
				t.Error(err)
			}
			if test.want != "" && (!apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("the answer is %v; want one that says %q", err, test.want)
			}
		})
	}
	slices, err := kube.ResourceV1().ResourceSlices().List(within(t), metav1.ListOptions{})
	if err != nil || len(slices.Items) == 0 {
		t.Fatalf("no slice to delete: %v", err)
	}
	err = agentOf(t, "other").ResourceV1().ResourceSlices().Delete(within(t), slices.Items[0].Name, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
	if err == nil || !strings.Contains(err.Error(), "of that node") {
		t.Errorf("another node's agent deletes a slice: %v", err)
	}
}

// agentOf returns a client that the API server takes for the agent of a node.
func agentOf(t *testing.T, nodeName string) kubernetes.Interface {
	t.Helper()
	config := rest.CopyConfig(node.RESTConfig())
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + chandler.Namespace + ":chandler"}
	if nodeName != "" {
		config.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {nodeName}}
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}
