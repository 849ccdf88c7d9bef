package main

import (
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

func TestOverheadIsByResource(t *testing.T) {
	_, compiled, err := parseConfig([]byte(header()+`
overhead:
- cel: "true"
  perPod: {memory: 512Mi, cpu: 100m}
  perContainer: {memory: 1Mi}
`), v1alpha1.Node{})
	if err != nil {
		t.Fatal(err)
	}
	amount := func(s string) *resource.Quantity { return new(resource.MustParse(s)) }
	want := rules.HostResources{
		"memory": {PerPod: amount("512Mi"), PerContainer: amount("1Mi")},
		"cpu":    {PerPod: amount("100m")},
	}
	if diff := cmp.Diff(want, compiled.Overhead[0].HostResources); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSeverityOfConfig(t *testing.T) {
	const header = "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n"
	config, _, err := parseConfig([]byte(header+"health: {severity: {over-temperature: NoExecute, unhealthy: None, link-degraded: NoSchedule}}\n"), v1alpha1.Node{})
	if err != nil {
		t.Fatal(err)
	}
	severity := severityOf(config.Health.Severity)
	for condition, want := range map[discovery.Condition]resourceapi.DeviceTaintEffect{
		discovery.ConditionOverTemperature: "NoExecute", discovery.ConditionUnhealthy: "None", discovery.ConditionLinkDegraded: "NoSchedule",
		discovery.ConditionGone: "NoSchedule", discovery.ConditionFatalErrors: "None",
	} {
		if got := severity.Effect(condition); got != want {
			t.Errorf("%s: %s, want %s", condition, got, want)
		}
	}
}

// The rules and each snapshot have the allocation settings of the configuration.
func TestAllocationOfConfig(t *testing.T) {
	_, compiled, err := parseConfig([]byte("apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n"+
		"allocation: [{resource: a.b/c, policy: Packed}, {resource: a.b/d, failRequestsGreaterThanOne: true, deviceIDStrategy: Index, env: {B: c, A: b}}]\n"), v1alpha1.Node{})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]rules.Allocation{"a.b/c": {Policy: rules.PolicyPacked}, "a.b/d": {One: true, Naming: discovery.Naming{Index: true}, Env: []string{"A=b", "B=c"}}}
	if got := compiled.Apply(&discovery.Snapshot{}).Allocation; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestSRIOVOfConfig(t *testing.T) {
	none := "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\nresources:\n- {name: intel.com/a, cel: 'true'}\n"
	if _, settings, err := parseSettings([]byte(none), v1alpha1.Node{}); err != nil || settings.Pools {
		t.Errorf("no pool: %v, %v", settings.Pools, err)
	}
	_, settings, err := parseSettings([]byte(none+`
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
