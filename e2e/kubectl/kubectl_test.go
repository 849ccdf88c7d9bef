package kubectl

import (
	"errors"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestParse(t *testing.T) {
	const manifest = `# a comment is no document
---
kind: Namespace
apiVersion: v1
metadata: {name: a}
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Pod, metadata: {name: b}}
- {apiVersion: v1, kind: Pod, metadata: {name: c}}
`
	objects, err := parse(manifest)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, object := range objects {
		got = append(got, describe(object))
	}
	if want := []string{"Namespace a", "Pod b", "Pod c"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestPodIs(t *testing.T) {
	tests := map[string]struct {
		status corev1.PodStatus
		phase  corev1.PodPhase
		is     bool
		final  bool
	}{
		"pending":              {corev1.PodStatus{Phase: corev1.PodPending}, corev1.PodRunning, false, false},
		"running, not ready":   {corev1.PodStatus{Phase: corev1.PodRunning}, corev1.PodRunning, false, false},
		"running, to succeed":  {corev1.PodStatus{Phase: corev1.PodRunning}, corev1.PodSucceeded, false, false},
		"failed, to succeed":   {corev1.PodStatus{Phase: corev1.PodFailed}, corev1.PodSucceeded, false, true},
		"succeeded, as wanted": {corev1.PodStatus{Phase: corev1.PodSucceeded}, corev1.PodSucceeded, true, false},
		"running and ready": {corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue},
		}}, corev1.PodRunning, true, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := podIs(&corev1.Pod{Status: test.status}, test.phase)
			if got := err == nil; got != test.is {
				t.Errorf("got %v", err)
			}
			var final finalError
			if got := errors.As(err, &final); got != test.final {
				t.Errorf("final %v: %v", got, err)
			}
		})
	}
}
