package chandler_test

import (
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/kubectl"
)

// The status of the DaemonSet may count a pod that is gone, or that is about to end.
func TestWaitForAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		labels := map[string]string{"app.kubernetes.io/name": "chandler"}
		pod := func(name string, ready corev1.ConditionStatus) *corev1.Pod {
			return &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: chandler.Namespace, Name: name, Labels: labels},
				Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}},
			}
		}
		ending := pod("ending", corev1.ConditionTrue)
		ending.DeletionTimestamp, ending.Finalizers = &metav1.Time{Time: time.Now()}, []string{"example.com/keep"}
		client := fake.NewClientset(ending, pod("starting", corev1.ConditionFalse), &appsv1.DaemonSet{
			ObjectMeta: metav1.ObjectMeta{Namespace: chandler.Namespace, Name: chandler.DaemonSet},
			Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}},
			Status:     appsv1.DaemonSetStatus{DesiredNumberScheduled: 1, NumberAvailable: 1, UpdatedNumberScheduled: 1},
		})
		ended := make(chan error, 1)
		go func() { ended <- chandler.WaitForAgent(t.Context(), &kubectl.Client{Interface: client}) }()
		time.Sleep(time.Minute)
		select {
		case err := <-ended:
			t.Fatalf("no agent is ready, and the wait has ended: %v", err)
		default:
		}
		if _, err := client.CoreV1().Pods(chandler.Namespace).UpdateStatus(t.Context(), pod("starting", corev1.ConditionTrue), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
