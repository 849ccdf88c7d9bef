package agent

import (
	"errors"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/cmd/chandler/agent/telemetry"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/reclaim"
)

// An invalid configuration is logged and reported in a metric, and the previous one stays in force.
// The log names settings that need a restart.
func TestChange(t *testing.T) {
	var log []string
	ctx := klog.NewContext(t.Context(), funcr.New(func(_, args string) { log = append(log, args) }, funcr.Options{}))
	first := &rules.Rules{Mode: discovery.ModeDRA}
	a := &agent{Config: Config{Settings: Settings{Rules: first}}, metrics: telemetry.NewMetrics("v1", true)}
	scans := 0
	a.settings = newLiveSettings(&a.Config, a.metrics, func() { scans++ })
	handler := a.metrics.Handler(telemetry.State{
		Features:   func() []features.Feature { return nil },
		Prepared:   func() int { return 0 },
		Placed:     func() *placement.Placed { return nil },
		View:       func(s exclusion.Stock) *ledger.View { return ledger.ViewOf(s) },
		Published:  func() (int, int, bool) { return 0, 0, false },
		Refusal:    func() string { return "" },
		Registered: func() (bool, bool) { return false, true },
	}, nil)
	scrape := func() string {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest("GET", "/metrics", nil))
		return answer.Body.String()
	}
	expectLines(t, scrape(), "chandler_config_last_reload_successful 1")

	a.settings.applyChange(ctx, Change{Err: errors.New("exclude[0].cel: no such field")})
	expectLines(t, scrape(), "chandler_config_last_reload_successful 0")
	if len(log) != 1 || !strings.Contains(log[0], "exclude[0].cel: no such field") {
		t.Errorf("logged %q", log)
	}
	if a.settings.inForce().Rules != first || len(a.settings.rulesChanged) > 0 {
		t.Error("the rules are others though the configuration is invalid")
	}

	log = nil
	second := Settings{Rules: &rules.Rules{}, Severity: discovery.Severity{discovery.ConditionGone: "NoExecute"}, Roots: map[string]string{"nvidia": "/run/driver"}}
	a.settings.applyChange(ctx, Change{Settings: second})
	expectLines(t, scrape(), "chandler_config_last_reload_successful 1", "chandler_config_restart_needed 1")
	if notes := a.notes(""); len(notes) != 1 || notes[0].Code != "CH0710" || !strings.Contains(notes[0].Reason, "a change of driverRoots is in force once") {
		t.Errorf("the page says %+v", notes)
	}
	if text := scrape(); !strings.Contains(text, "\nchandler_config_last_reload_success_timestamp_seconds 1.") {
		t.Errorf("no time:\n%s", text)
	}
	if len(log) != 2 || !strings.Contains(log[1], "once the agent is started again") || !strings.Contains(log[1], `"fields"=["driverRoots"]`) {
		t.Errorf("logged %q", log)
	}
	if rules := <-a.settings.rulesChanged; rules != second.Rules || a.settings.inForce().Severity.EffectOf(discovery.ConditionGone) != "NoExecute" || scans != 1 {
		t.Error("the new settings are not in force")
	}

	log = nil
	a.settings.applyChange(ctx, Change{Settings: Settings{Rules: first}})
	if len(log) != 1 || len(a.notes("")) > 0 {
		t.Errorf("logged %q, the page says %+v", log, a.notes(""))
	}
	expectLines(t, scrape(), "chandler_config_restart_needed 0")

	log = nil
	third := Settings{Rules: &rules.Rules{}, Passthrough: everything, VirtualFunctions: []discovery.Selection[int]{{Expression: "true"}}, Partition: []discovery.Selection[struct{}]{{Expression: "true"}}}
	a.settings.applyChange(ctx, Change{Settings: third})
	if want := `"fields"=["passthrough" "onDemand.virtualFunctions" "onDemand.partitions"]`; len(log) != 2 || !strings.Contains(strings.ReplaceAll(log[1], ",", " "), want) {
		t.Errorf("logged %q, want %s", log, want)
	}
	a.settings.applyChange(ctx, Change{Settings: Settings{Rules: &rules.Rules{}, Pools: true}})
	if fields := a.settings.outdatedFields(); !slices.Equal(fields, []string{"resources.sriov"}) {
		t.Errorf("after the first pool of the SR-IOV plugin, a restart is needed for %q", fields)
	}
	a.settings.applyChange(ctx, Change{Settings: Settings{Rules: &rules.Rules{}, Reclaim: []discovery.Selection[reclaim.Rule]{{Expression: "true"}}, IdleTime: time.Minute}})
	if fields := a.settings.outdatedFields(); len(fields) > 0 {
		t.Errorf("a restart is needed for %q", fields)
	}
}

// expectLines checks that metrics contain lines.
func expectLines(t *testing.T, text string, lines ...string) {
	t.Helper()
	for _, line := range lines {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("%q is missing:\n%s", line, text)
		}
	}
}
