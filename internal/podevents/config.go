package podevents

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
)

// TellOfConfig tells the pod of an agent why its configuration is wrong. The same
// is told once.
func TellOfConfig(ctx context.Context, client kubernetes.Interface, node string, pod *Pod, wrong error) error {
	event := eventOf(pod, "configuration "+wrong.Error(), wrong.Error(), node, time.Now())
	event.Action, event.Reason, event.Type = "ReadConfiguration", ReasonConfig, corev1.EventTypeWarning
	return create(ctx, client, event)
}
