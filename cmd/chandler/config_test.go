package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
)

func TestOverheadIsByResource(t *testing.T) {
	_, rules, err := parseConfig([]byte(header() + `
overhead:
- cel: "true"
  perPod: {memory: 512Mi, cpu: 100m}
  perContainer: {memory: 1Mi}
`))
	if err != nil {
		t.Fatal(err)
	}
	amount := func(s string) *resource.Quantity { return new(resource.MustParse(s)) }
	want := discovery.HostResources{
		"memory": {PerPod: amount("512Mi"), PerContainer: amount("1Mi")},
		"cpu":    {PerPod: amount("100m")},
	}
	if diff := cmp.Diff(want, rules.Overhead[0].HostResources); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
