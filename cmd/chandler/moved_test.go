package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// A command of kubectl-chandler is refused with the command to use, whatever its arguments, and the
// help does not list it.
func TestMovedCommands(t *testing.T) {
	for line, want := range map[string]string{
		"top nodes -o json":              "top is a command of kubectl-chandler: kubectl chandler top",
		"who gpu-node-07":                "who is a command of kubectl-chandler: kubectl chandler who",
		"why -n ml train-42":             "why is a command of kubectl-chandler: kubectl chandler why",
		"report --this-node":             "report is a command of kubectl-chandler: kubectl chandler report",
		"validate config.yaml":           "validate is a command of kubectl-chandler: kubectl chandler validate",
		"import a.yaml":                  "import is a command of kubectl-chandler: kubectl chandler import",
		"config import --only file.yaml": "import is a command of kubectl-chandler: kubectl chandler import",
		"top --help":                     "top is a command of kubectl-chandler: kubectl chandler top",
	} {
		if out, _, err := chandler(strings.Fields(line)...); err == nil || err.Error() != want || out != "" {
			t.Errorf("chandler %s: error %v, output %q", line, err, out)
		}
	}
	var listed []string
	for _, c := range newCommand().Commands() {
		if c.IsAvailableCommand() {
			listed = append(listed, c.Name())
		}
	}
	for _, m := range moved {
		if slices.Contains(listed, m.name) {
			t.Errorf("the help lists %s", m.name)
		}
		if c, _, err := newPlugin().Find([]string{m.desk}); err != nil || c.Name() != m.desk {
			t.Errorf("kubectl-chandler has no command %s: %v", m.desk, err)
		}
	}
}

// The node's program contains no code for users of a cluster: no importer, no kubectl plugin, and
// no allocator of Kubernetes.
func TestPackagesOfTheNode(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.Lines(string(out)) {
		name = strings.TrimSpace(name)
		for _, desk := range []string{
			"chandler.dev/cmd/kubectl-chandler", "chandler.dev/internal/why", "chandler.dev/internal/fleet", "chandler.dev/internal/redact",
			"k8s.io/dynamic-resource-allocation/structured", "k8s.io/component-helpers", "k8s.io/client-go/tools/remotecommand",
		} {
			if name == desk || strings.HasPrefix(name, desk+"/") {
				t.Errorf("the program contains %s", name)
			}
		}
	}
}
