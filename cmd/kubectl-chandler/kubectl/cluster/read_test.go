package cluster

import (
	"encoding/json"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

// The files of a report have an empty list where the cluster has no objects.
func TestListWithoutObjects(t *testing.T) {
	nodes, err := ListObjects[corev1.Node](t.Context(), fake.NewClientset().CoreV1().Nodes().List, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if text, err := json.Marshal(nodes); err != nil || string(text) != "[]" {
		t.Errorf("%s, error %v; want []", text, err)
	}
}
