package removal

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func TestOrders(t *testing.T) {
	for _, o := range []Order{{}, {Withhold, "a", 3}, {Remove, "b-c", 0}} {
		if got := Parse(o.String()); got != o {
			t.Errorf("%q is %+v", o, got)
		}
	}
	for _, text := range []string{"Withhold", "Withhold a", "Leave a 1", "Remove a b", "null"} {
		if got := Parse(text); got != (Order{}) {
			t.Errorf("%q is %+v", text, got)
		}
	}
}

// An agent can read its order, and the order can be revoked.
func TestGiveAndTell(t *testing.T) {
	client := fake.NewClientset(
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: ConfigMap, Namespace: "ns", Annotations: map[string]string{"a": "b"}}},
		&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "pod", Namespace: "ns"},
			Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
		},
	)
	for _, o := range []Order{{Withhold, "x", 1}, {Remove, "x", 2}, {}} {
		if err := WriteOrder(t.Context(), client, "ns", o); err != nil {
			t.Fatal(err)
		}
		config, err := client.CoreV1().ConfigMaps("ns").Get(t.Context(), ConfigMap, metav1.GetOptions{})
		if err != nil || Parse(config.Annotations[Annotation]) != o || config.Annotations["a"] != "b" {
			t.Errorf("%+v: %v %v", o, config.Annotations, err)
		}
	}
	for _, r := range []Report{{"x", InUse, "pod a/b has c"}, {"x", Removed, ""}, {"", Offering, ""}} {
		if err := Tell(t.Context(), client, "ns", "pod", r); err != nil {
			t.Fatal(err)
		}
		pod, err := client.CoreV1().Pods("ns").Get(t.Context(), "pod", metav1.GetOptions{})
		if got, told := ReportOf(pod); err != nil || !told || got != r || len(pod.Status.Conditions) != 2 {
			t.Errorf("%+v is %+v: %+v %v", r, got, pod.Status.Conditions, err)
		}
	}
}
