// Package monitor runs chandler doctor with node-problem-detector's own code.
package monitor

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/node-problem-detector/pkg/custompluginmonitor/plugin"
	"k8s.io/node-problem-detector/pkg/custompluginmonitor/types"
)

const root = "../../.."

// TestMonitor runs doctor on a host with healthy devices and on hosts with faults.
// node-problem-detector must get the status and a message within its length limit.
func TestMonitor(t *testing.T) {
	program := filepath.Join(t.TempDir(), "chandler")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./cmd/chandler")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	hosts, err := filepath.Abs(root + "/discovery/families/nvidia/testdata")
	if err != nil {
		t.Fatal(err)
	}
	for host, test := range map[string]struct {
		status  types.Status
		message string
	}{
		hosts + "/h100x8.host": {types.OK, "no faults found"},
		hosts + "/broken.host": {types.NonOK, "CH"},
		hosts + "/none.host":   {types.Unknown, "read host recording"},
	} {
		t.Run(filepath.Base(host), func(t *testing.T) {
			config := load(t, program)
			config.Rules = config.Rules[:1] // The first rule checks devices, which recorded hosts have.
			config.Rules[0].Args = append(config.Rules[0].Args, host)
			p := plugin.NewPlugin(config)
			go p.Run()
			t.Cleanup(p.Stop)
			select {
			case result := <-p.GetResultChan():
				if result.ExitStatus != test.status || !strings.HasPrefix(result.Message, test.message) || len(result.Message) > 80 {
					t.Errorf("status %d, message %q", result.ExitStatus, result.Message)
				}
			case <-time.After(time.Minute):
				t.Fatal("no result")
			}
		})
	}
}

// load reads the configuration as node-problem-detector does.
func load(t *testing.T, program string) types.CustomPluginConfig {
	t.Helper()
	data, err := os.ReadFile(root + "/deployments/node-problem-detector/chandler-monitor.json")
	if err != nil {
		t.Fatal(err)
	}
	var config types.CustomPluginConfig
	if err := json.Unmarshal(data, &config); err != nil {
		t.Fatal(err)
	}
	for _, rule := range config.Rules {
		if rule.Path != "/usr/local/bin/chandler" {
			t.Errorf("the documentation says nothing of %s", rule.Path)
		}
		rule.Path = program
	}
	if err := config.ApplyConfiguration(); err != nil {
		t.Fatal(err)
	}
	if err := config.Validate(); err != nil {
		t.Fatal(err)
	}
	return config
}
