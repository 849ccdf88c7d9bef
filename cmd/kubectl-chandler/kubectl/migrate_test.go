package kubectl

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// migrate runs the command of the node's program in the agent's pod.
func TestMigrate(t *testing.T) {
	_, client := withAgents(t)
	for name, test := range map[string]struct {
		args    string
		command []string // in the agent's pod
		stdout  string   // of the command
		fails   string   // standard error of the command
		prints  string
		error   string
	}{
		"plan":      {args: "plan gpu-node-07", command: []string{"/chandler", "migrate", "plan", "--to=DRA"}, stdout: "DEVICE\npci-1\n", prints: "DEVICE\npci-1\n"},
		"plan back": {args: "plan gpu-node-07 --to=DevicePlugin -o json", command: []string{"/chandler", "migrate", "plan", "--to=DevicePlugin", "--output=json"}, stdout: "{}\n", prints: "{}\n"},
		"status":    {args: "status gpu-node-07", command: []string{"/chandler", "migrate", "status"}, stdout: "a\x1b[2Jb\n", prints: "a?[2Jb\n"},
		"refused":   {args: "plan gpu-node-07 --to=X", command: []string{"/chandler", "migrate", "plan", "--to=X"}, fails: "chandler: mode: unknown\n", error: "node gpu-node-07: mode: unknown"},
		"no agent":  {args: "status vm-1", error: "node vm-1: no agent runs there that you may see"},
		"format":    {args: "status gpu-node-07 -o yaml", error: `output format "yaml": want json`},
		"no node":   {args: "plan", error: "accepts 1 arg(s), received 0"},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOptions("v1.2.3")
			o.Client = client
			var got []string
			o.Exec = func(_ context.Context, _ *corev1.Pod, command []string) (stdout, stderr []byte, err error) {
				got = command
				if test.fails != "" {
					return nil, []byte(test.fails), errors.New("exit code 1")
				}
				return []byte(test.stdout), nil, nil
			}
			var out bytes.Buffer
			cmd := newMigrate(o)
			cmd.SilenceErrors, cmd.SilenceUsage = true, true
			cmd.SetArgs(strings.Fields(test.args))
			cmd.SetOut(&out)
			err := cmd.ExecuteContext(t.Context())
			if !slices.Equal(got, test.command) || out.String() != test.prints {
				t.Errorf("ran %q, printed %q", got, out.String())
			}
			if (err != nil) != (test.error != "") || err != nil && err.Error() != test.error {
				t.Errorf("error %v, want %q", err, test.error)
			}
		})
	}
}
