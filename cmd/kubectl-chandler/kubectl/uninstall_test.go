package kubectl

import (
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes/fake"
)

// Without --namespace, the agents of the default namespace leave, not those of the kubeconfig's
// namespace.
func TestUninstallNamespace(t *testing.T) {
	for args, namespace := range map[string]string{"": "chandler", "--namespace=accelerators": "accelerators", "-n accelerators": "accelerators"} {
		out, _, err := run(t, fake.NewClientset(), 80, append([]string{"uninstall"}, strings.Fields(args)...)...)
		if want := "There is no DaemonSet of agents in namespace " + namespace + ","; err != nil || !strings.HasPrefix(out, want) {
			t.Errorf("uninstall %s: %q, %v; want %q", args, out, err, want)
		}
	}
}
