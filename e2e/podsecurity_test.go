package e2e

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
)

// TestPodSecurity creates the agent's pod in namespaces with different labels. The pod must be
// rejected unless the label of the namespace enforces the level "privileged" of the Pod Security
// Standards. The cluster of these tests enforces "baseline" by default.
func TestPodSecurity(t *testing.T) {
	agent, err := kube.AppsV1().DaemonSets(chandler.Namespace).Get(within(t), chandler.DaemonSet, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "agent"}, Spec: agent.Spec.Template.Spec}
	// These service accounts only exist in the namespace of the agent.
	pod.Spec.ServiceAccountName, pod.Spec.DeprecatedServiceAccount = "", ""
	tests := map[string]struct {
		labels map[string]string
		want   string
	}{
		"no label":   {nil, `violates PodSecurity "baseline`},
		"baseline":   {map[string]string{"pod-security.kubernetes.io/enforce": "baseline"}, `violates PodSecurity "baseline`},
		"restricted": {map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}, `violates PodSecurity "restricted`},
		"privileged": {map[string]string{"pod-security.kubernetes.io/enforce": "privileged"}, ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "pod-security-" + strings.ReplaceAll(name, " ", "-"), Labels: test.labels}}
			if _, err := kube.CoreV1().Namespaces().Create(within(t), namespace, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := kube.CoreV1().Namespaces().Delete(within(t), namespace.Name, metav1.DeleteOptions{}); err != nil {
					t.Error(err)
				}
			})
			account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
			if _, err := kube.CoreV1().ServiceAccounts(namespace.Name).Create(within(t), account, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
				t.Fatal(err)
			}
			_, err := kube.CoreV1().Pods(namespace.Name).Create(within(t), pod, metav1.CreateOptions{DryRun: dryRun})
			if test.want == "" && err != nil {
				t.Error(err)
			}
			if test.want != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("the answer is %v; want one that says %q", err, test.want)
			}
		})
	}
}
