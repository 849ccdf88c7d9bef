package agent

import (
	"errors"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// A configuration that is wrong is logged and told in a metric, and the one before
// stays in force. The log names settings that wait for the next start.
func TestChange(t *testing.T) {
	var log []string
	ctx := klog.NewContext(t.Context(), funcr.New(func(_, args string) { log = append(log, args) }, funcr.Options{}))
	first := &rules.Rules{Mode: discovery.ModeDRA}
	a := &agent{Config: Config{Settings: Settings{Rules: first}}, metrics: newAgentMetrics("v1"), rules: make(chan *rules.Rules, 1), events: make(chan struct{}, 1), wrong: make(chan error, 1), righted: make(chan struct{})}
	a.settings.Store(&a.Settings)
	scrape := serveMetrics(t, a.metrics, emptyState())
	expectLines(t, scrape(), "chandler_config_last_reload_successful 1")

	a.change(ctx, Change{Err: errors.New("exclude[0].cel: no such field")})
	expectLines(t, scrape(), "chandler_config_last_reload_successful 0")
	if len(log) != 1 || !strings.Contains(log[0], "exclude[0].cel: no such field") {
		t.Errorf("logged %q", log)
	}
	if a.settings.Load().Rules != first || len(a.rules) > 0 {
		t.Error("the rules are others though the configuration is wrong")
	}

	log = nil
	second := Settings{Rules: &rules.Rules{}, Severity: discovery.Severity{discovery.ConditionGone: "NoExecute"}, Roots: map[string]string{"nvidia": "/run/driver"}}
	a.change(ctx, Change{Settings: second})
	expectLines(t, scrape(), "chandler_config_last_reload_successful 1")
	if text := scrape(); !strings.Contains(text, "\nchandler_config_last_reload_success_timestamp_seconds 1.") {
		t.Errorf("no time:\n%s", text)
	}
	if len(log) != 2 || !strings.Contains(log[1], "once the agent is started again") {
		t.Errorf("logged %q", log)
	}
	if rules := <-a.rules; rules != second.Rules || a.settings.Load().Severity.Effect(discovery.ConditionGone) != "NoExecute" || len(a.events) != 1 {
		t.Error("the new settings are not in force")
	}

	log = nil
	a.change(ctx, Change{Settings: Settings{Rules: first}})
	if len(log) != 1 {
		t.Errorf("logged %q", log)
	}
}
