package settings

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/internal/compile"
)

// header returns the beginning of a configuration.
func header() string { return "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n" }

func TestSeverityOfConfig(t *testing.T) {
	config, err := compile.ForNode([]byte(header()+"health: {severity: {over-temperature: NoExecute, unhealthy: None, link-degraded: NoSchedule}}\n"), v1alpha1.Node{})
	if err != nil {
		t.Fatal(err)
	}
	severity := SeverityOf(config.Health.Severity)
	for condition, want := range map[discovery.Condition]resourceapi.DeviceTaintEffect{
		discovery.ConditionOverTemperature: "NoExecute", discovery.ConditionUnhealthy: "None", discovery.ConditionLinkDegraded: "NoSchedule",
		discovery.ConditionGone: "NoSchedule", discovery.ConditionFatalErrors: "None",
	} {
		if got := severity.EffectOf(condition); got != want {
			t.Errorf("%s: %s, want %s", condition, got, want)
		}
	}
}

func TestSRIOVOfConfig(t *testing.T) {
	none := header() + "resources:\n- {name: intel.com/a, cel: 'true'}\n"
	if _, settings, err := Parse([]byte(none), v1alpha1.Node{}); err != nil || settings.Pools {
		t.Errorf("no pool: %v, %v", settings.Pools, err)
	}
	_, settings, err := Parse([]byte(none+`
- {name: intel.com/b, cel: "true", sriov: {}}
- {name: intel.com/c, cel: "true", sriov: {needVhostNet: true, excludeTopology: true, additionalInfo: {"*": {token: x}}}}
`), v1alpha1.Node{})
	if err != nil || !settings.Pools {
		t.Fatal(settings.Pools, err)
	}
	compiled := settings.Rules
	info := map[string]map[string]string{"*": {"token": "x"}}
	for i, want := range []*discovery.SRIOVPool{nil, {}, {AdditionalInfo: info, NeedVhostNet: true, ExcludeTopology: true}} {
		if diff := cmp.Diff(want, compiled.Resources[i].SRIOV); diff != "" {
			t.Errorf("resources[%d] (-want +got):\n%s", i, diff)
		}
	}
}
