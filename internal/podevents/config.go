package podevents

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
)

// TellOfConfig creates an Event for an agent's pod with the error of the configuration. The
// same error creates one Event only.
func TellOfConfig(ctx context.Context, client kubernetes.Interface, node string, pod *Pod, wrong error) error {
	event := eventOf(pod, "configuration "+wrong.Error(), wrong.Error(), node, time.Now())
	event.Action, event.Reason, event.Type = "ReadConfiguration", ReasonConfig, corev1.EventTypeWarning
	return create(ctx, client, event)
}

// TellOfLabel creates an Event for an agent's pod with the reason why the agent must not leave the
// node, although the node's label excludes agents.
func TellOfLabel(ctx context.Context, client kubernetes.Interface, node string, pod *Pod, wrong error) error {
	event := eventOf(pod, "label "+wrong.Error(), wrong.Error(), node, time.Now())
	event.Action, event.Reason, event.Type = "LeaveNode", ReasonLabel, corev1.EventTypeWarning
	return create(ctx, client, event)
}
