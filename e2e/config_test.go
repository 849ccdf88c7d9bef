package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
)

// usual returns the configuration with which the tests begin.
func usual(t *testing.T) string {
	t.Helper()
	return example(t, "config-kvm-classic.yaml")
}

// besides returns the usual configuration with additional fields and additional entries of
// resources.
func besides(t *testing.T, fields, resources string) string {
	t.Helper()
	const list = "    resources:\n"
	config := strings.Replace(usual(t), list, indented(fields)+list, 1)
	return strings.TrimRight(config, "\n") + "\n" + indented(resources)
}

// indented returns lines of YAML with the indentation of a ConfigMap.
func indented(text string) string {
	var out strings.Builder
	for line := range strings.Lines(strings.TrimLeft(text, "\n")) {
		out.WriteString("    " + line)
	}
	return out.String()
}

// usualAgain restores the usual configuration when the test ends.
func usualAgain(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		reconfigure(t, usual(t))
		if *version == build.Classic { // Without DRA there are no slices.
			gpusAre(t, allGPUs)
			return
		}
		offers(t)
	})
}

// TestAgentStartsWithAnInvalidConfiguration starts an agent whose configuration is invalid. The agent
// must work with the last valid configuration. An Event of the agent's pod must name the error, and
// the pod must not be ready until the error is fixed. Beside another agent, as during an update,
// the new agent must leave the work to the other one.
func TestAgentStartsWithAnInvalidConfiguration(t *testing.T) {
	offers(t)
	usualAgain(t)
	unharmed := holders(t)
	if err := kube.Apply(within(t), besides(t, "exclude:\n- cel: device.attributes[\n", "")); err != nil {
		t.Fatal(err)
	}
	before, err := chandler.AgentPod(within(t), kube)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("beside another", func(t *testing.T) { testWrongBeside(t, before) })
	if err := kube.DeletePod(within(t), chandler.Namespace, before.Name); err != nil {
		t.Fatal(err)
	}
	until(t, "the agent's pod to be told", func(ctx context.Context) error {
		agent, err := chandler.AgentPod(ctx, kube)
		if err != nil {
			return err
		}
		events, err := kube.EventsV1().Events(chandler.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=ConfigurationInvalid"})
		told := func(e eventsv1.Event) bool {
			return e.Regarding.UID == agent.UID && agent.UID != before.UID && strings.Contains(e.Note, "exclude[0].cel")
		}
		if err == nil && !slices.ContainsFunc(events.Items, told) {
			err = fmt.Errorf("the events are %v", events.Items)
		}
		return err
	})
	offers(t)
	unharmed(t)
	works(t)
	agent, err := chandler.AgentPod(within(t), kube)
	if err != nil {
		t.Fatal(err)
	}
	if status := agent.Status.ContainerStatuses[0]; status.Ready || status.RestartCount > 0 {
		t.Errorf("the agent with a wrong configuration is ready: %t, and was restarted %d times", status.Ready, status.RestartCount)
	}
	if err := kube.Apply(within(t), usual(t)); err != nil {
		t.Fatal(err)
	}
	if err := chandler.WaitForAgent(within(t), kube); err != nil {
		t.Fatal(err)
	}
}

// testWrongBeside begins an update while the configuration is invalid, and takes the update back.
// Meanwhile pods must start by both APIs, and the working agent must keep running.
func testWrongBeside(t *testing.T, earlier *corev1.Pod) {
	annotate := func(value string) {
		patch := `{"spec": {"template": {"metadata": {"annotations": {"chandler.dev/e2e": ` + value + `}}}}}`
		if _, err := kube.AppsV1().DaemonSets(chandler.Namespace).Patch(within(t), chandler.DaemonSet, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	annotate(`"wrong"`)
	t.Cleanup(func() { annotate("null") })
	agents := func(ctx context.Context) ([]corev1.Pod, error) {
		pods, err := kube.CoreV1().Pods(chandler.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=chandler"})
		return pods.Items, err
	}
	until(t, "an agent with a wrong configuration to run beside the other", func(ctx context.Context) error {
		pods, err := agents(ctx)
		if err != nil {
			return err
		}
		for i := range pods {
			said, err := kube.CoreV1().Pods(chandler.Namespace).ProxyGet("http", pods[i].Name, "8080", "readyz", nil).DoRaw(ctx)
			if pods[i].UID != earlier.UID && (strings.Contains(string(said), "exclude[0].cel") || err != nil && strings.Contains(err.Error(), "exclude[0].cel")) {
				return nil
			}
		}
		return fmt.Errorf("there are %d agents", len(pods))
	})
	works(t)
	pods, err := agents(within(t))
	if err != nil || len(pods) != 2 {
		t.Fatalf("there are %d agents, %v", len(pods), err)
	}
	for i := range pods {
		status := pods[i].Status.ContainerStatuses[0]
		if old := pods[i].UID == earlier.UID; status.Ready != old || status.RestartCount != earlier.Status.ContainerStatuses[0].RestartCount && old {
			t.Errorf("agent %s, which was there before: %t, is ready: %t, and was restarted %d times", pods[i].Name, old, status.Ready, status.RestartCount)
		}
	}
	annotate("null")
	until(t, "the update to be taken back", func(ctx context.Context) error {
		agent, err := chandler.AgentPod(ctx, kube)
		if err == nil && agent.UID != earlier.UID {
			err = errors.New("the agent that worked is gone")
		}
		return err
	})
}

// reconfigure changes the agent's configuration and restarts the agent.
func reconfigure(t *testing.T, config string) {
	t.Helper()
	ctx := within(t)
	if err := kube.Apply(ctx, config); err != nil {
		t.Fatal(err)
	}
	agent, err := chandler.AgentPod(ctx, kube)
	if err != nil {
		t.Fatal(err)
	}
	if err := kube.DeletePod(ctx, chandler.Namespace, agent.Name); err != nil {
		t.Fatal(err)
	}
	if err := chandler.WaitForAgent(ctx, kube); err != nil {
		t.Fatal(err)
	}
}
