package chandler

import (
	"context"
	_ "embed" // for SimulatedValues
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"chandler.dev/e2e/kubectl"
)

// SimulatedValues are the chart's values for an agent on a simulated host.
//
//go:embed values.yaml
var SimulatedValues string

// Helm runs the real Helm on one cluster. Helm stores files in Home only.
type Helm struct {
	Program    string // path of the program
	Kubeconfig string
	Home       string // a private directory
}

// Run runs Helm in Chandler's namespace and returns the output. With the argument
// "--values=-", Helm reads values from standard input.
func (h Helm) Run(ctx context.Context, values string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, h.Program, append([]string{"--kubeconfig=" + h.Kubeconfig, "--namespace=" + Namespace}, args...)...)
	cmd.Stdin = strings.NewReader(values)
	cmd.Env = os.Environ()
	for _, dir := range []string{"CACHE", "CONFIG", "DATA"} {
		cmd.Env = append(cmd.Env, "HELM_"+dir+"_HOME="+filepath.Join(h.Home, dir))
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("helm %s: %w\n%s", args[0], err, out)
	}
	return string(out), nil
}

// Chart returns the directory of the chart.
func (p Project) Chart() string { return p.Manifest("helm/chandler") }

// InstallChart installs the chart with the agent on the simulated host, waits until the agent
// runs, and returns Helm's output.
func (p Project) InstallChart(ctx context.Context, h Helm, k *kubectl.Client) (string, error) {
	out, err := h.Run(ctx, SimulatedValues, "install", "chandler", p.Chart(), "--create-namespace", "--values=-")
	if err != nil {
		return out, err
	}
	return out, WaitForAgent(ctx, k)
}
