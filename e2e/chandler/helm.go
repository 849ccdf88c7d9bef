package chandler

import (
	"context"
	_ "embed" // the values
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"chandler.dev/e2e/kubectl"
)

// SimulatedValues are the chart's values with which an agent stands in a simulated host.
//
//go:embed values.yaml
var SimulatedValues string

// Helm is the real Helm, on one cluster. It keeps no files but in Home.
type Helm struct {
	Program    string // its path
	Kubeconfig string
	Home       string // a directory of its own
}

// Run runs Helm in the namespace of Chandler, with values from standard input where an
// argument is "--values=-", and returns what it writes.
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

// InstallChart installs the chart so that the agent stands in the simulated host, waits
// until the agent runs, and returns what Helm says.
func (p Project) InstallChart(ctx context.Context, h Helm, k *kubectl.Client) (string, error) {
	out, err := h.Run(ctx, SimulatedValues, "install", "chandler", p.Chart(), "--create-namespace", "--values=-")
	if err != nil {
		return out, err
	}
	return out, WaitForAgent(ctx, k)
}
