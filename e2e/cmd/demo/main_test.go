package main

import (
	"strings"
	"testing"
)

// TestToType checks that a user learns where the cluster is, how to inspect it, how to get a shell
// on the node, and how to stop the cluster.
func TestToType(t *testing.T) {
	said := toType("/tmp/x/kubeconfig", []string{"/cache/machine", "enter", "42", "bash"})
	for _, want := range []string{"export KUBECONFIG=/tmp/x/kubeconfig\n", "/chandler doctor\n", "/chandler inventory\n", "On the node: env -u KUBECONFIG /cache/machine enter 42 bash\n", "make cluster-stop\n"} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in\n%s", want, said)
		}
	}
}
