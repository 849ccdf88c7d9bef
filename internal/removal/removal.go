package removal

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

const (
	// ConfigMap is the name of the agents' configuration in their namespace, which carries the
	// orders.
	ConfigMap = "chandler"

	// Annotation is the annotation of the ConfigMap with the current order.
	Annotation = "chandler.dev/removal"

	// Condition is the type of the pod condition with an agent's answer.
	Condition corev1.PodConditionType = "chandler.dev/Removal"

	// Beat is the renewal interval of an order to withhold.
	Beat = 10 * time.Second

	// Patience is the lifetime of an order to withhold without renewal. The command may have died.
	Patience = time.Minute
)

// Phase is a phase of the removal.
type Phase string

// The phases. None means that there is no order.
const (
	None     Phase = ""
	Withhold Phase = "Withhold" // allocate no more devices
	Remove   Phase = "Remove"   // remove everything from the node, if no device is allocated
)

// Order is an order to the agents. Its text is "Withhold <ID> <beat>".
type Order struct {
	Phase Phase
	ID    string // of the removal
	Beat  int    // incremented by each renewal
}

// String returns the text of an order, or "" without an order.
func (o Order) String() string {
	if o.Phase == None {
		return ""
	}
	return fmt.Sprintf("%s %s %d", o.Phase, o.ID, o.Beat)
}

// Parse returns the order in a text. Invalid texts are no order.
func Parse(text string) Order {
	var o Order
	if n, err := fmt.Sscanf(text, "%s %s %d", &o.Phase, &o.ID, &o.Beat); n != 3 || err != nil || o.Phase != Withhold && o.Phase != Remove {
		return Order{}
	}
	return o
}

// WriteOrder writes an order to the ConfigMap of a namespace. The zero Order revokes the current
// order.
func WriteOrder(ctx context.Context, client kubernetes.Interface, namespace string, o Order) error {
	var text any
	if o.Phase != None {
		text = o.String()
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{Annotation: text}}})
	if err != nil {
		return err
	}
	_, err = client.CoreV1().ConfigMaps(namespace).Patch(ctx, ConfigMap, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// State is the state of an agent with respect to an order.
type State string

// The states, used as reasons of the condition.
const (
	Offering State = "Offering" // there is no order
	Waiting  State = "Waiting"  // the agent has not withheld all devices yet
	Withheld State = "Withheld" // no device is allocated, and none will be
	InUse    State = "InUse"    // a device is still allocated, and no more will be
	Removed  State = "Removed"  // nothing is left on the node except the pod
	Failed   State = "Failed"   // something could not be removed
)

// Report is an agent's answer to an order.
type Report struct {
	ID     string // of the removal
	State  State
	Detail string // the allocations, or the error
}

// Tell writes a report to the status of the agent's own pod.
func Tell(ctx context.Context, client kubernetes.Interface, namespace, pod string, r Report) error {
	status := metav1.ConditionTrue
	if r.State == Offering {
		status = metav1.ConditionFalse
	}
	// The kubelet preserves pod conditions that it does not own (pkg/util/pod/pod.go and
	// pkg/kubelet/status, mergePodStatus, in 1.28 to 1.37).
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []any{map[string]any{
		"type": Condition, "status": status, "reason": r.State, "message": strings.TrimSpace(r.ID + " " + r.Detail),
		"lastTransitionTime": metav1.Now(),
	}}}})
	if err != nil {
		return err
	}
	_, err = client.CoreV1().Pods(namespace).Patch(ctx, pod, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// ReportOf returns the last report of an agent's pod, and whether there is one.
func ReportOf(pod *corev1.Pod) (Report, bool) {
	for _, c := range pod.Status.Conditions {
		if c.Type == Condition {
			id, detail, _ := strings.Cut(c.Message, " ")
			return Report{ID: id, State: State(c.Reason), Detail: detail}, true
		}
	}
	return Report{}, false
}
