package v1alpha1

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const provisionHeader = "apiVersion: chandler.dev/v1alpha1\nkind: ProvisionConfig\n"

func TestParseProvisionConfig(t *testing.T) {
	got, err := ParseProvisionConfig([]byte(provisionHeader + `
functions:
- cel: "true"
  services: [sym, asym]
  virtualFunctions: {count: 16, driver: vfio-pci}
- cel: "false"
  workQueueGroups:
  - engines: 2
    workQueues:
    - {name: one, mode: dedicated, size: 16, priority: 3}
    - {name: all, mode: shared, size: 32}
- {cel: "false", driver: vfio-pci}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := &ProvisionConfig{
		TypeMeta: metav1.TypeMeta{APIVersion: APIVersion, Kind: KindProvisionConfig},
		Functions: []Function{{
			CEL:              "true",
			Services:         []string{"sym", "asym"},
			VirtualFunctions: &VirtualFunctions{Count: 16, Driver: "vfio-pci"},
		}, {
			CEL: "false",
			WorkQueueGroups: []WorkQueueGroup{{Engines: 2, WorkQueues: []WorkQueue{
				{Name: "one", Mode: WorkQueueDedicated, Size: 16, Priority: 3},
				{Name: "all", Mode: WorkQueueShared, Size: 32, Priority: 10, Threshold: 32}, // both by default
			}}},
		}, {
			CEL:    "false",
			Driver: "vfio-pci",
		}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ParseProvisionConfig (-want +got):\n%s", diff)
	}
}

// Each error has the invalid field and the valid values.
func TestParseProvisionConfigRefuses(t *testing.T) {
	queue := func(fields string) string {
		return "{cel: 'true', workQueueGroups: [{engines: 1, workQueues: [{" + fields + "}]}]}"
	}
	for name, test := range map[string]struct {
		function string
		want     []string
	}{
		"unknown field":         {"{cel: 'true', vfs: 3}", []string{"vfs", "unknown field"}},
		"no expression":         {"{driver: vfio-pci}", []string{"functions[0].cel"}},
		"both settings":         {"{cel: 'true', services: [dc], workQueueGroups: [{engines: 1, workQueues: [{name: a, mode: dedicated, size: 1}]}]}", []string{"functions[0].services:", "both"}},
		"has no setting":        {"{cel: 'true'}", []string{"functions[0]:", "has no setting"}},
		"driver and more":       {"{cel: 'true', driver: vfio-pci, virtualFunctions: {count: 1}}", []string{"functions[0].driver", "virtualFunctions.driver"}},
		"driver leads out":      {"{cel: 'true', driver: ../../../etc}", []string{"functions[0].driver", "../../../etc"}},
		"driver of VFs":         {"{cel: 'true', virtualFunctions: {count: 1, driver: a/b}}", []string{"functions[0].virtualFunctions.driver: is", "a/b"}},
		"no virtual function":   {"{cel: 'true', virtualFunctions: {driver: vfio-pci}}", []string{"functions[0].virtualFunctions.count: is 0"}},
		"too many":              {"{cel: 'true', virtualFunctions: {count: 65536}}", []string{"count: is 65536"}},
		"no service":            {"{cel: 'true', services: ['sym;asym']}", []string{"functions[0].services[0]", "sym;asym"}},
		"unknown service":       {"{cel: 'true', services: [sym, foo]}", []string{"functions[0].services[1]", `is "foo"`, "decomp"}},
		"service twice":         {"{cel: 'true', services: [sym, sym]}", []string{"functions[0].services[1]", "earlier"}},
		"no engine":             {"{cel: 'true', workQueueGroups: [{workQueues: [{name: a, mode: shared, size: 1}]}]}", []string{"workQueueGroups[0].engines"}},
		"no queue":              {"{cel: 'true', workQueueGroups: [{engines: 1}]}", []string{"workQueueGroups[0].workQueues: must"}},
		"queue without a name":  {queue("mode: shared, size: 1"), []string{"workQueueGroups[0].workQueues[0].name"}},
		"name of two lines":     {queue(`name: "a\nb", mode: shared, size: 1`), []string{"name", `a\nb`}},
		"mode":                  {queue("name: a, mode: both, size: 1"), []string{"mode", "both", "dedicated"}},
		"no size":               {queue("name: a, mode: shared"), []string{"size: is 0"}},
		"priority":              {queue("name: a, mode: shared, size: 1, priority: 16"), []string{"priority: is 16"}},
		"threshold":             {queue("name: a, mode: shared, size: 1, threshold: 2"), []string{"threshold: is 2"}},
		"dedicated's threshold": {queue("name: a, mode: dedicated, size: 1, threshold: 1"), []string{"threshold: is for shared"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseProvisionConfig([]byte(provisionHeader + "functions: [" + test.function + "]\n"))
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error does not name %q: %v", want, err)
				}
			}
		})
	}
	if _, err := ParseProvisionConfig([]byte(header)); err == nil || !strings.Contains(err.Error(), "DriverConfig") {
		t.Errorf("another kind: %v", err)
	}
}

// Decoding any text ends with a valid value or an error.
func FuzzParseProvisionConfig(f *testing.F) {
	f.Add([]byte(provisionHeader + "functions:\n- {cel: 'true', virtualFunctions: {count: 1, driver: vfio-pci}}\n"))
	f.Add([]byte(provisionHeader + "functions: [{cel: a, workQueueGroups: [{engines: 1, workQueues: [{name: a, mode: shared, size: 9}]}]}]"))
	f.Add([]byte("{"))
	f.Fuzz(func(t *testing.T, data []byte) {
		config, err := ParseProvisionConfig(data)
		if err != nil {
			return
		}
		if err := config.Validate(); err != nil {
			t.Errorf("accepted, and yet not valid: %v", err)
		}
		for _, function := range config.Functions {
			if strings.ContainsAny(function.Driver, "/\n") {
				t.Errorf("accepted the driver %q", function.Driver)
			}
		}
	})
}
