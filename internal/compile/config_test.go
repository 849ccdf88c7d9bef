package compile

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

const header = "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n"

func TestOverheadIsByResource(t *testing.T) {
	config, err := ForNode([]byte(header+`
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
	if diff := cmp.Diff(want, config.Rules.Overhead[0].HostResources); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The rules and each snapshot have the additional attributes. Names of unknown attributes are errors.
func TestAttributesOfConfig(t *testing.T) {
	config, err := ForNode([]byte(header+"attributes: [serial, group4]\n"), v1alpha1.Node{})
	if err != nil {
		t.Fatal(err)
	}
	if got := config.Rules.ApplyTo(&discovery.Snapshot{}).Attributes; !slices.Equal(got, []resourceapi.QualifiedName{"serial", "group4"}) {
		t.Errorf("got %v", got)
	}
	const want = `attributes[1]: is "serail"; no device has this attribute; the nearest name is serial`
	if _, err := Config([]byte(header + "attributes: [serial, serail]\n")); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// The rules and each snapshot have the allocation settings of the configuration.
func TestAllocationOfConfig(t *testing.T) {
	config, err := ForNode([]byte(header+
		"allocation: [{resource: a.b/c, policy: Packed}, {resource: a.b/d, failRequestsGreaterThanOne: true, deviceIDStrategy: Index, env: {B: c, A: b}}]\n"), v1alpha1.Node{})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]rules.Allocation{"a.b/c": {Policy: rules.PolicyPacked}, "a.b/d": {One: true, Naming: discovery.Naming{Index: true}, Env: []string{"A=b", "B=c"}}}
	if got := config.Rules.ApplyTo(&discovery.Snapshot{}).Allocation; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A reload compiles each expression once, although the configuration is checked for all nodes and
// converted for one.
func TestEachExpressionIsCompiledOnce(t *testing.T) {
	text := []byte(header + `
exclude: [{cel: "1 > 1"}, {cel: "1 > 2", nodes: {names: [other]}}]
sharing: [{cel: "1 > 3", resource: a.b/c, replicas: 2}]
resources: [{cel: "1 > 4", name: a.b/d}]
passthrough: [{cel: "1 > 5"}]
reclaim: [{cel: "1 > 6"}, {cel: "1 > 1"}]
onDemand:
  virtualFunctions: [{cel: "1 > 7"}]
  partitions: [{cel: "1 > 8"}]
  mps: [{cel: "1 > 9"}]
  timeSlices: [{cel: "1 > 10"}]
overhead: [{cel: "1 > 11", perPod: {memory: 1Mi}}]
`)
	compiled := make(map[string]int)
	config, err := newCompiler(func(expression string) (rules.Selector, error) {
		compiled[expression]++
		return rules.Compile(expression)
	}).forNode(text, v1alpha1.Node{Name: "one"})
	if err != nil {
		t.Fatal(err)
	}
	want := make(map[string]int)
	for i := range 11 {
		want[fmt.Sprintf("1 > %d", i+1)] = 1
	}
	if diff := cmp.Diff(want, compiled); diff != "" {
		t.Errorf("compilations (-want +got):\n%s", diff)
	}
	got := []string{config.Passthroughs[0].Expression, config.Reclaims[0].Expression, config.VirtualFunctions[0].Expression, config.Partitionings[0].Expression,
		config.SharingDaemons[discovery.SharingDaemonMPS][0].Expression, config.SharingDaemons[discovery.SharingDaemonTimeSlices][0].Expression}
	if diff := cmp.Diff([]string{"1 > 5", "1 > 6", "1 > 7", "1 > 8", "1 > 9", "1 > 10"}, got); diff != "" {
		t.Errorf("selections (-want +got):\n%s", diff)
	}
	if len(config.Rules.Exclude) != 1 {
		t.Errorf("%d exclusions, of which one is for another node", len(config.Rules.Exclude))
	}
}
