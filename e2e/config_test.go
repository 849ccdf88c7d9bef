package e2e

import (
	"strings"
	"testing"

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
		offers(t)
	})
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
