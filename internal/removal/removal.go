// Package removal is what the command that removes Chandler and the agents say to each
// other. The command writes an order to the agents' ConfigMap, as an annotation. Each agent
// answers with a condition of its own pod. Both go when Chandler does.
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
	// ConfigMap is the agents' configuration, in their namespace, which bears orders.
	ConfigMap = "chandler"

	// Annotation of the ConfigMap is the order that is in force.
	Annotation = "chandler.dev/removal"

	// Condition is the type of the condition by which an agent answers.
	Condition corev1.PodConditionType = "chandler.dev/Removal"

	// Beat is how often an order to withhold is renewed.
	Beat = 10 * time.Second

	// Patience is how long it is in force without that: whoever gave it may have died.
	Patience = time.Minute
)

// Phase is how far the removal has come.
type Phase string

// The phases. There is no order in the phase None.
const (
	None     Phase = ""
	Withhold Phase = "Withhold" // nobody new gets anything
	Remove   Phase = "Remove"   // leave nothing on the node, if nobody has anything
)

// Order is what the agents are to do. Its text is "Withhold <ID> <beat>".
type Order struct {
	Phase Phase
	ID    string // of the removal
	Beat  int    // counts up while the order is renewed
}

// String returns the text of an order, "" of none.
func (o Order) String() string {
	if o.Phase == None {
		return ""
	}
	return fmt.Sprintf("%s %s %d", o.Phase, o.ID, o.Beat)
}

// Parse returns the order of a text. One that is not understood is none.
func Parse(text string) Order {
	var o Order
	if n, err := fmt.Sscanf(text, "%s %s %d", &o.Phase, &o.ID, &o.Beat); n != 3 || err != nil || o.Phase != Withhold && o.Phase != Remove {
		return Order{}
	}
	return o
}

// Give writes an order to the ConfigMap of a namespace, or takes back the one that is there.
func Give(ctx context.Context, client kubernetes.Interface, namespace string, o Order) error {
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

// State is what has become of an order.
type State string

// The states. They are reasons of the condition.
const (
	Offering State = "Offering" // there is no order
	Waiting  State = "Waiting"  // the agent has yet to withhold something
	Withheld State = "Withheld" // nobody has anything, and nobody new gets anything
	InUse    State = "InUse"    // somebody has something, and nobody new gets anything
	Removed  State = "Removed"  // nothing is left on the node but the pod
	Failed   State = "Failed"   // something could not be removed
)

// Report is an agent's answer to an order.
type Report struct {
	ID     string // of the removal
	State  State
	Detail string // who has what, or what failed
}

// Tell writes a report to the status of the agent's own pod.
func Tell(ctx context.Context, client kubernetes.Interface, namespace, pod string, r Report) error {
	status := metav1.ConditionTrue
	if r.State == Offering {
		status = metav1.ConditionFalse
	}
	// The kubelet keeps conditions of pods that are not its own
	// (pkg/util/pod/pod.go and pkg/kubelet/status, mergePodStatus, in 1.28 to 1.37).
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

// Of returns the last report of an agent's pod, and false if there is none.
func Of(pod *corev1.Pod) (Report, bool) {
	for _, c := range pod.Status.Conditions {
		if c.Type == Condition {
			id, detail, _ := strings.Cut(c.Message, " ")
			return Report{ID: id, State: State(c.Reason), Detail: detail}, true
		}
	}
	return Report{}, false
}
