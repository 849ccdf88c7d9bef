package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestPodWithTunedGPU sets environment variables in the class and the claim of a device. The
// container must get both, and the claim's values must override the class's. An Event of the pod
// must name a parameter that the device does not accept.
func TestPodWithTunedGPU(t *testing.T) {
	manifest := example(t, "gpu-tuned.yaml")
	t.Run("taken", func(t *testing.T) {
		apply(t, manifest)
		f := succeed(t, "gpu-tuned")
		for name, want := range map[string]string{"GPU_MAX_HW_QUEUES": "8", "HSA_XNACK": "1", "HSA_NO_SCRATCH_RECLAIM": "1", "HSA_XNACK_GPU_GPU": "1"} {
			if got := f.variable(name); got != want {
				t.Errorf("%s = %q; want %q", name, got, want)
			}
		}
		remove(t, manifest)
	})
	for says, instead := range map[string]string{
		"family amdgpu takes no environment[NCCL_IB_TC]": "environment: {NCCL_IB_TC: \"1\"}",
		"family amdgpu takes no computePercentage":       "computePercentage: 50",
	} {
		t.Run(instead, func(t *testing.T) {
			claimed, _, _ := strings.Cut(manifest, "            environment:\n              GPU_MAX_HW_QUEUES: \"8\"")
			_, rest, _ := strings.Cut(manifest, "HSA_XNACK: \"1\"\n")
			apply(t, claimed+"            "+instead+"\n"+rest)
			until(t, "the pod's events to say "+says, func(ctx context.Context) error {
				events, err := kube.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=gpu-tuned"})
				if err != nil {
					return err
				}
				var messages []string
				for _, event := range events.Items {
					messages = append(messages, event.Message)
				}
				if !strings.Contains(strings.Join(messages, "\n"), says) {
					return fmt.Errorf("they are %q", messages)
				}
				return nil
			})
			remove(t, claimed+"            "+instead+"\n"+rest)
		})
	}
	nothingHeld(t)
}
