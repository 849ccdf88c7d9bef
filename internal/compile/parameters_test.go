package compile

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/families/fpgaintel"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/network"
)

// Parameters converts all parameters of a claim to the agent's names.
func TestReadParameters(t *testing.T) {
	got, err := Parameters([]byte(`{"apiVersion": "chandler.dev/v1alpha1", "kind": "ClaimParameters", "interfaceName": "net1",
		"acceleratorFunction": "D8424DC4-a4a3c413f89e433683f9040b", "computePercentage": 50, "environment": {"HSA_XNACK": "1", "B": "x=y"}}`))
	if err != nil {
		t.Fatal(err)
	}
	want := discovery.Parameters{
		network.InterfaceName:                       "net1",
		fpgaintel.AcceleratorFunction:               "d8424dc4a4a3c413f89e433683f9040b",
		nvidia.ComputePercentage:                    "50",
		discovery.EnvironmentParameter("HSA_XNACK"): "1",
		discovery.EnvironmentParameter("B"):         "x=y",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The documentation lists the environment variables and parameters that families support.
func TestDocumentedParameters(t *testing.T) {
	data, err := os.ReadFile("../../docs/claim-parameters.md")
	if err != nil {
		t.Fatal(err)
	}
	variables := make(map[string][]string) // by family
	takers := make(map[string][]string)    // by parameter
	name := regexp.MustCompile("`([^`]+)`")
	for line := range strings.Lines(string(data)) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 || !strings.HasPrefix(cells[1], " `") {
			continue
		}
		var names []string
		for _, found := range name.FindAllStringSubmatch(cells[len(cells)-2], -1) {
			names = append(names, found[1])
		}
		first := name.FindStringSubmatch(cells[1])[1]
		if len(cells) == 4 {
			variables[first] = names
		} else if len(names) > 0 {
			takers[first] = names
		}
	}
	wantVariables, wantTakers := make(map[string][]string), make(map[string][]string)
	for _, f := range families.All {
		if len(f.Variables) > 0 {
			wantVariables[f.Name] = f.Variables
		}
		for _, p := range f.Parameters {
			wantTakers[string(p)] = append(wantTakers[string(p)], f.Name)
		}
	}
	for _, names := range slices.Collect(maps.Values(wantTakers)) {
		slices.Sort(names)
	}
	if diff := cmp.Diff(wantVariables, variables); diff != "" {
		t.Errorf("variables (-families +documentation):\n%s", diff)
	}
	if diff := cmp.Diff(wantTakers, takers); diff != "" {
		t.Errorf("parameters (-families +documentation):\n%s", diff)
	}
}
