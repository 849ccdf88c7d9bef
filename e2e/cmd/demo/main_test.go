package main

import (
	"strings"
	"testing"
)

// A user learns where the cluster is, how to look at it, how to get onto the node, and how to end it.
func TestToType(t *testing.T) {
	said := toType("/tmp/x/kubeconfig", []string{"/cache/machine", "enter", "42", "bash"})
	for _, want := range []string{"export KUBECONFIG=/tmp/x/kubeconfig\n", "/chandler doctor\n", "/chandler inventory\n", "On the node: env -u KUBECONFIG /cache/machine enter 42 bash\n", "make cluster-stop\n"} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in\n%s", want, said)
		}
	}
}
