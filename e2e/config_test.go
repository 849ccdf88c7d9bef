package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
)

// usual returns the configuration with which the tests begin.
func usual(t *testing.T) string {
	t.Helper()
	return example(t, "config-kvm-classic.yaml")
}

// besides returns the usual configuration with further fields, and further
// entries of its resources.
func besides(t *testing.T, fields, resources string) string {
	t.Helper()
	const list = "    resources:\n"
	config := strings.Replace(usual(t), list, indented(fields)+list, 1)
	return strings.TrimRight(config, "\n") + "\n" + indented(resources)
}

// indented returns lines of YAML as they are in a ConfigMap.
func indented(text string) string {
	var out strings.Builder
	for line := range strings.Lines(strings.TrimLeft(text, "\n")) {
		out.WriteString("    " + line)
	}
	return out.String()
}

// usualAgain has the usual configuration put back when the test ends.
func usualAgain(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		reconfigure(t, usual(t))
		if *version == build.Classic { // which has no slices
			gpusAre(t, allGPUs)
			return
		}
		offers(t)
	})
}

// An agent that starts while its configuration is wrong works as the last one that was
// right says. Its pod is told what is wrong, and is not ready until that is mended.
func TestAgentStartsWithAWrongConfiguration(t *testing.T) {
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
	if err := kube.DeletePod(within(t), chandler.Namespace, before.Name); err != nil {
		t.Fatal(err)
	}
	until(t, "the agent's pod to be told", func(ctx context.Context) error {
		events, err := kube.EventsV1().Events(chandler.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=ConfigurationInvalid"})
		if err == nil && (len(events.Items) == 0 || !strings.Contains(events.Items[0].Note, "exclude[0].cel")) {
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

// reconfigure gives the agent another configuration, with which it starts anew.
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
