package compile

import (
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

const header = "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n"

func TestOverheadIsByResource(t *testing.T) {
	_, compiled, err := ForNode([]byte(header+`
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

// The rules and each snapshot have the allocation settings of the configuration.
func TestAllocationOfConfig(t *testing.T) {
	_, compiled, err := ForNode([]byte(header+
		"allocation: [{resource: a.b/c, policy: Packed}, {resource: a.b/d, failRequestsGreaterThanOne: true, deviceIDStrategy: Index, env: {B: c, A: b}}]\n"), v1alpha1.Node{})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]rules.Allocation{"a.b/c": {Policy: rules.PolicyPacked}, "a.b/d": {One: true, Naming: discovery.Naming{Index: true}, Env: []string{"A=b", "B=c"}}}
	if got := compiled.ApplyTo(&discovery.Snapshot{}).Allocation; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
